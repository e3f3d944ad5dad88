// Numbers for people, as `kvtier stat` writes them (kvtier/cli/shown.py).

const threeDigits = (value) => String(Number(value.toPrecision(3)));

export const count = (value) => Math.round(value).toLocaleString("en-US");

export function bytes(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) {
      return `${size < 999.5 ? threeDigits(size) : Math.round(size)} ${unit}`;
    }
    size /= 1024;
  }
  return `${threeDigits(size)} TiB`;
}

export function seconds(value) {
  if (Math.abs(value) < 1) return value ? `${threeDigits(value * 1000)} ms` : "0 ms";
  return Math.abs(value) < 999.5 ? `${threeDigits(value)} s` : `${count(value)} s`;
}

export const share = (value) => (
  value > 0 && value < 0.01 ? "< 1 %" : `${Math.round(100 * value)} %`);

export function span(value) {
  // How long ago, or for how long: the two largest units.
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => value >= size);
  if (first < 0) return "0 s";
  let left = Math.floor(value);
  return units.slice(first, first + 2).map(([size, unit]) => {
    const whole = Math.floor(left / size);
    left -= whole * size;
    return whole ? `${whole} ${unit}` : "";
  }).filter(Boolean).join(" ");
}

export const clock = (date) => date.toLocaleTimeString("en-GB");
