// The tiers and the arrows between them, drawn twice: side by side, and one above the other.

import { svg } from "./element.js";
import { bytes, count, share } from "./number.js";

const SIGNS = { up: "●", degraded: "◐", drained: "▽", out: "✕", detached: "◌", off: "○" };
const NAMES = { gpu: "GPU", cpu: "CPU", ssd: "SSD", remote: "Remote" };

export const named = (tier) => NAMES[tier] ?? tier;

// A state as a sign and a word, in addition to its colour.
export const stated = (state) => `${SIGNS[state] ?? "◇"} ${state}`;

// A state as part of a class name; a newer daemon may have other states.
export const word = (state) => state.replace(/[^a-z]/g, "");

// Boxes as [x, y, width, height]; arrows as their center and direction.
const WIDE = {
  box: "-2 -2 764 240",
  tiers: {
    gpu: [0, 0, 180, 236], cpu: [290, 0, 180, 236],
    ssd: [580, 0, 180, 110], remote: [580, 126, 180, 110],
  },
  arrows: {
    cpu_to_gpu: [235, 84, "left"], gpu_to_cpu: [235, 170, "right"],
    ssd_to_cpu: [525, 38, "left"], cpu_to_ssd: [525, 88, "right"],
    remote_to_cpu: [525, 164, "left"], cpu_to_remote: [525, 214, "right"],
  },
};
const NARROW = {
  box: "-2 -2 364 504",
  tiers: {
    gpu: [0, 0, 360, 92], cpu: [0, 192, 360, 92],
    ssd: [0, 384, 174, 116], remote: [186, 384, 174, 116],
  },
  arrows: {
    cpu_to_gpu: [60, 142, "up"], gpu_to_cpu: [300, 142, "down"],
    ssd_to_cpu: [16, 334, "up"], cpu_to_ssd: [158, 334, "down"],
    remote_to_cpu: [202, 334, "up"], cpu_to_remote: [344, 334, "down"],
  },
};

const LENGTH = 84;
const SLOWEST = 1024; // bytes per second; below this an arrow has its minimum width
const UNIT_WIDTH = 2.2; // for each factor of ten above it

const TURNS = { right: 0, down: 90, left: 180, up: 270 };

// `rates` are bytes per second by route.
export function flow(tiers, rates) {
  const spoken = Object.entries(rates).filter(([, rate]) => rate > 0)
    .map(([route, rate]) => `${spelled(route)} ${bytes(rate)} per second`);
  const label = `Flows between tiers: ${spoken.join(", ") || "none in the last minute"}`;
  return [["wide", WIDE], ["narrow", NARROW]].map(([name, plan]) => (
    svg("svg", { class: `flow ${name}`, viewBox: plan.box, role: "img", "aria-label": label },
      ...Object.entries(plan.arrows).filter(([route]) => isThere(tiers, route))
        .map(([route, place]) => arrow(route, place, rates[route] ?? 0)),
      ...Object.entries(plan.tiers).map(([tier, place]) => box(tier, place, tiers[tier])))));
}

const spelled = (route) => route.split("_to_").map(named).join(" to ");

const isThere = (tiers, route) => route.split("_to_").every((tier) => tiers[tier].state !== "off");

function box(name, [x, y, width, height], tier) {
  const { state, used_bytes: used, capacity_bytes: capacity } = tier;
  const full = capacity ? Math.min(1, used / capacity) : 0;
  const tube = { x: x + 12, width: 8, rx: 4 };
  const [top, long] = [y + 14, height - 28];
  const line = (place, kind, text) => svg("text", { x: x + 32, y: place, class: kind }, text);
  return svg("g", { class: `tier ${name} is-${word(state)}` },
    svg("rect", { x, y, width, height, rx: 6, class: "case" }),
    svg("rect", { ...tube, y: top, height: long, class: "trough" }),
    svg("rect", { ...tube, y: top + long * (1 - full), height: long * full, class: "level" }),
    line(y + 27, "name", named(name)),
    // Beside the name where there is room, else below it.
    width > 300
      ? svg("text", { x: x + width - 14, y: y + 27, class: "state right" }, stated(state))
      : line(y + 47, "state", stated(state)),
    ...(["off", "unknown"].includes(state) ? [] : [
      line(y + height - 34, "held", capacity ? `${bytes(used)} · ${share(full)}` : bytes(used)),
      line(y + height - 16, "held", `${count(tier.tokens)} tokens`),
    ]));
}

function arrow(route, [x, y, way], rate) {
  const half = rate ? (1 + UNIT_WIDTH * Math.max(0.5, Math.log10(rate / SLOWEST))) / 2 : 0.75;
  const head = half + 5;
  const [from, to, neck] = [-LENGTH / 2, LENGTH / 2, LENGTH / 2 - head * 1.1];
  const points = [
    [from, -half], [neck, -half], [neck, -head], [to, 0], [neck, head], [neck, half], [from, half],
  ];
  const text = rate ? `${bytes(rate)}/s` : "–";
  return svg("g", { class: `arrow from-${route.split("_")[0]} ${rate ? "moves" : "rests"}` },
    svg("polygon", {
      points: points.map((point) => point.map((each) => each.toFixed(1)).join(",")).join(" "),
      transform: `translate(${x} ${y}) rotate(${TURNS[way]})`,
    }),
    svg("text", { class: `rate ${way}`, ...beside(x, y, way, head + 4) }, text));
}

// Above a horizontal arrow; between two vertical ones, one higher than the other.
function beside(x, y, way, gap) {
  if (way === "up") return { x: x + gap, y: y - 4 };
  if (way === "down") return { x: x - gap, y: y + 14 };
  return { x, y: y - gap };
}
