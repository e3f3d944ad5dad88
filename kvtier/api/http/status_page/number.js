// Numbers for people, as the command line writes them (kvtier/cli/formatting.py).

const threeDigits = (value) => String(Number(value.toPrecision(3)));

export const count = (value) => Math.round(value).toLocaleString("en-US");

export function bytes(size) {
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(size) < 1024) break;
    [size, unit] = [size / 1024, larger];
  }
  return `${Math.abs(size) < 999.5 ? threeDigits(size) : Math.round(size)} ${unit}`;
}

export function seconds(value) {
  if (Math.abs(value) < 1) return `${threeDigits(value * 1000)} ms`;
  return Math.abs(value) < 999.5 ? `${threeDigits(value)} s` : `${count(value)} s`;
}

export const share = (value) => (
  value > 0 && value < 0.01 ? "< 1 %" : `${Math.round(100 * value)} %`);

// An age or a duration.
export function span(value) {
  if (value < 120) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const clock = (date) => date.toLocaleTimeString("en-GB");
