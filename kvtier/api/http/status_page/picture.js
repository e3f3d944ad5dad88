// Renders one status document.

import { bar, html, show, svg, table } from "./element.js";
import { flow, named, stated, word } from "./flow.js";
import { bytes, count, seconds, share, span } from "./number.js";

const REQUESTS_MAX = 16;
const STEPS_MAX = 60; // of the history: five minutes
const KINDS = ["gpu", "cpu", "ssd", "remote"];

// The sentences of `kvtier explain`.
const REASONS = {
  all: "restoring all cached blocks is fastest",
  part: "restoring this part is fastest; the rest is computed sooner",
  split: "the end is restored while the beginning is computed, until they meet",
  cost: "computing is faster",
  risk: "computing is slower on average, but restoring might take far longer",
  guard: "the tier is skipped for now, because its recent restores did not pay off",
  limit: "limited by the request",
  nothing: "none of the missing blocks is cached",
  always: "cost.restore is always",
  never: "cost.restore is never",
};

const element = (id) => document.getElementById(id);

export function draw(told) {
  const { minute } = told.grown;
  const rates = Object.fromEntries(Object.entries(minute.moved_bytes)
    .map(([route, moved]) => [route, perSecond(moved, minute)]));
  show(element("who"), `${told.version} · pid ${told.pid} · up ${span(told.uptime_s)}`);
  show(element("worth"), worth(told.worth), dials(minute, told.history));
  show(element("flow"), ...flow(told.tiers, rates));
  show(element("tiers"), tiers(told), ...complaints(told));
  show(element("decisions"), ...decisions(told.worth));
  show(element("engines"), engines(told.engines));
  show(element("requests"), requests(told.requests));
  show(element("ends"), ends(told));
}

const perSecond = (amount, { seconds: time }) => (time ? amount / time : 0);

function worth(told) {
  const { saved_s: saved, saved_measured_s: measured, lost_s: lost, regret_s: regret } = told;
  const net = saved - lost;
  return html("p", { class: "worth" },
    html("strong", { class: net < 0 ? "bad" : "" }, signed(net)),
    html("span", {}, " time to first token ", net < 0 ? "lost" : "saved",
      " since the start"),
    html("small", {}, `saved ${seconds(saved)}, ${seconds(measured)} of it measured`
      + ` and ${seconds(saved - measured)} predicted · lost ${seconds(lost)}`
      + (regret ? ` · the other choice would have saved ${seconds(regret)}` : "")));
}

// The growth in the last minute as a number, and per step of the history as a curve.
function dials(minute, history) {
  const drawn = (name, now, steps, unit) => {
    const most = Math.max(...steps.filter((each) => each !== null), 0);
    const values = [...Array(STEPS_MAX - steps.length).fill(null), ...steps];
    return html("figure", {},
      html("figcaption", {}, name), html("b", {}, now === null ? "–" : unit(now)),
      spark(values, most, `${name} over five minutes, max ${unit(most)}`),
      html("small", {}, `5 min, max ${unit(most)}`));
  };
  const dial = (name, measure, unit) => drawn(name, measure(minute), history.map(measure), unit);
  return html("div", { class: "dials" },
    drawn("saved per minute", netSaved(minute), netByMinute(history), signed),
    dial("tokens found", (grown) => ratio(grown.found_tokens, grown.asked_tokens), share),
    dial("restored", (grown) => perSecond(grown.restored_bytes, grown),
      (rate) => `${bytes(rate)}/s`),
    dial("first token", (grown) => ratio(grown.first_token_s, grown.first_tokens), seconds));
}

const netSaved = (grown) => grown.saved_s - grown.lost_s;

// Time saved in the minute before each step's end. Extrapolating from one step of five seconds
// would turn one restore into twelve.
export const netByMinute = (history) => history.map((_, end) => {
  let [net, time] = [0, 0];
  for (let place = end; place >= 0 && time < 60; place -= 1) {
    net += netSaved(history[place]);
    time += history[place].seconds;
  }
  return net;
});

const ratio = (part, whole) => (whole ? part / whole : null);

// A line over five minutes, with gaps where data is missing.
function spark(values, most, label) {
  const [width, height] = [240, 40];
  const step = width / (values.length - 1);
  let isDrawing = false;
  const path = values.map((value, place) => {
    if (value === null) {
      isDrawing = false;
      return "";
    }
    const y = height - 1 - (most ? (Math.max(0, value) / most) * (height - 3) : 0);
    const start = isDrawing ? "L" : "M";
    isDrawing = true;
    // A value between two unknown ones is drawn as a dot.
    const x = (place * step).toFixed(1);
    return `${start}${x} ${y.toFixed(1)}${start === "M" ? "h0.01" : ""}`;
  }).join("");
  return svg("svg", {
    class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": label,
  }, svg("title", {}, label), svg("path", { d: path || "M0 0" }));
}

function tiers({ tiers: all, tokens }) {
  const rows = Object.entries(all).map(([name, tier]) => {
    const full = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
    const size = sized(tier.used_bytes, tier.capacity_bytes);
    const head = [
      html("b", { class: `key ${name}` }, named(name)),
      html("span", { class: `state is-${word(tier.state)}` }, stated(tier.state)),
    ];
    // Unknown values are not zero.
    if (tier.state === "unknown") return [...head, null, null, null, null, null];
    return [
      ...head,
      html("span", { class: "gauge" }, bar(size, [[full, name]]), html("span", {}, size)),
      count(tier.blocks), count(tier.tokens),
      // Engines count the tokens in the GPU tier themselves.
      count(tokens.found[name] ?? tier.hit_tokens), optional(tokens.loaded[name], count),
    ];
  });
  return table("Tiers", [
    ["tier"], ["state"], ["held"], ["blocks", "number"], ["tokens held", "number"],
    ["tokens found", "number"], ["tokens loaded", "number"],
  ], rows);
}

// Problems, in the daemon's words.
function complaints({ tiers: all, miss_reasons: missed, background_faults: faults }) {
  const counted = (counts) => (
    Object.entries(counts).map(([name, number]) => `${name} ${count(number)}`).join(", "));
  const lines = [];
  for (const [name, { state, reason, hung_calls: hung }] of Object.entries(all)) {
    if (reason) lines.push(`${named(name)} is ${state}: ${reason}`);
    if (hung) lines.push(`${named(name)}: hung calls: ${hung}`);
  }
  for (const [name, reasons] of Object.entries(missed)) {
    const counts = counted(reasons);
    if (counts) lines.push(`not served by ${named(name)}: ${counts}`);
  }
  if (counted(faults)) lines.push(`errors in background tasks: ${counted(faults)}`);
  return lines.map((line) => html("p", { class: "complaint" }, line));
}

function decisions(told) {
  const found = Object.entries(told.decisions).sort(([, one], [, other]) => other - one);
  if (!found.length) return [html("p", { class: "none" }, "none yet: no request found cached blocks")];
  const all = found.reduce((sum, [, number]) => sum + number, 0);
  return [
    table("Decisions by reason",
      [["reason"], ["meaning", "minor"], ["share"], ["requests", "number"]],
      found.map(([reason, number]) => [
        html("b", {}, reason), REASONS[reason] ?? "",
        html("span", { class: "gauge" }, bar(share(number / all), [[number / all, "all"]]),
          html("span", {}, share(number / all))),
        count(number),
      ])),
    forecast(told),
  ];
}

function forecast({ predicted_s: predicted, actual_s: actual }) {
  const rows = [["first_token", "first tokens"], ["restore", "restores"]]
    .filter(([of]) => actual[of])
    .map(([of, name]) => [
      html("b", {}, name), seconds(predicted[of]), seconds(actual[of]),
      share(predicted[of] / actual[of]),
    ]);
  if (!rows.length) return html("p", { class: "none" }, "no engine has reported a result yet");
  return table("Predicted and actual seconds", [
    ["metric"], ["predicted", "number"], ["actual", "number"], ["predicted / actual", "number"],
  ], rows);
}

function engines(all) {
  if (!all.length) return html("p", { class: "none" }, "none attached");
  const rows = all.map((engine) => {
    const { gpu_used_bytes: used, gpu_capacity_bytes: capacity, first_tokens: number } = engine;
    const size = capacity ? sized(used, capacity) : "–";
    const asked = engine.prompt_tokens;
    return [
      html("b", {}, engine.engine), `${engine.pid}`, engine.transport,
      html("span", { class: "gauge" }, bar(size, [[capacity ? used / capacity : 0, "gpu"]]),
        html("span", {}, size)),
      count(engine.requests),
      asked ? share(engine.restored_tokens / asked) : null,
      number ? seconds(engine.first_token_s / number) : null,
      signed(engine.saved_s - engine.lost_s),
      `${engine.loads} / ${engine.stores}`,
    ];
  });
  return table("Engines", [
    ["engine", "long"], ["pid", "number minor"], ["transport", "minor"], ["GPU pool"],
    ["requests", "number"], ["restored", "number"], ["first token", "number"],
    ["saved", "number"], ["loads / stores", "number minor"],
  ], rows);
}

function requests(all) {
  if (!all.length) return html("p", { class: "none" }, "none yet");
  return table("Recent requests", [
    ["ago", "short"], ["request", "short"], ["engine", "long minor"], ["prompt", "number minor"],
    ["source"], ["decision"], ["first token", "number"], ["predicted", "number minor"],
    ["saved", "number"],
  ], all.slice(0, REQUESTS_MAX).map(request));
}

function request(told) {
  const { prompt_tokens: asked, saved_s: saved } = told;
  const restored = told.restored_tokens ?? {};
  const from = { gpu: told.gpu_tokens, ...restored };
  const known = KINDS.filter((kind) => from[kind]);
  const computed = Math.max(0, asked - known.reduce((sum, kind) => sum + from[kind], 0));
  const label = [...known.map((kind) => `${named(kind)} ${count(from[kind])}`),
    computed ? `computed ${count(computed)}` : ""].filter(Boolean).join(" · ");
  return [
    span(told.age_s), html("code", {}, told.request_id || "–"), told.engine, count(asked),
    html("span", { class: "gauge" },
      bar(label, known.map((kind) => [asked ? from[kind] / asked : 0, kind])),
      html("span", {}, told.restored_tokens ? label : "not reported yet")),
    html("span", { title: REASONS[told.reason] ?? "" }, told.reason),
    optional(told.first_token_s), optional(told.predicted_s),
    typeof saved === "number" ? claim(told) : null,
  ];
}

// Time saved by a request; ~ marks a prediction, for a prompt whose computation was not measured.
function claim({ saved_s: saved, cold_s: cold }) {
  const isMeasured = typeof cold === "number";
  const title = isMeasured
    ? `measured: computing the same prompt took ${seconds(cold)}` : "predicted";
  return html("span", { class: better(saved), title }, isMeasured ? "" : "~", signed(saved));
}

const signed = (value) => `${value < 0 ? "−" : ""}${seconds(Math.abs(value))}`;

const better = (saved) => (saved < 0 ? "bad" : saved > 0 ? "good" : "");

const sized = (used, capacity) => (
  capacity ? `${bytes(used)} of ${bytes(capacity)}` : bytes(used));

const optional = (value, shown = seconds) => (typeof value === "number" ? shown(value) : null);

function ends({ leases, pins, boot }) {
  return `leases ${count(leases)} · pins ${count(pins)} · boot ${boot}`;
}
