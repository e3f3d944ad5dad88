// The last five minutes of the daemon's counters. Kept here alone: closing the page forgets them.

const KEPT_S = 300;
const BUCKET_S = 5;
const MINUTE_S = 60;

const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);
const total = (engines, name) => engines.reduce((sum, each) => sum + (each[name] ?? 0), 0);

// What is watched: numbers that only grow while the daemon lives and its engines stay.
function counters(told) {
  const routes = Object.entries(told.transfers).map(([name, route]) => [name, route.bytes]);
  return {
    ...Object.fromEntries(routes),
    saved: told.worth.saved_s,
    lost: told.worth.lost_s,
    asked: told.tokens.asked,
    found: sum(told.tokens.found),
    firstTokens: total(told.engines, "first_tokens"),
    firstTokenS: total(told.engines, "first_token_s"),
  };
}

export class History {
  #boot = "";
  #samples = [];

  // Note a document. Another daemon, or one that began anew, counts from nothing.
  add(told) {
    const last = this.#samples.at(-1);
    if (told.boot !== this.#boot || (last && told.uptime_s < last.at)) this.#samples = [];
    this.#boot = told.boot;
    this.#samples.push({ at: told.uptime_s, ...counters(told) });
    while (this.#samples[0].at < told.uptime_s - KEPT_S - BUCKET_S) this.#samples.shift();
  }

  // By how much counters grew in the last minute, or since this page looks on, and in how long.
  lastMinute() {
    const last = this.#samples.at(-1);
    return growth(this.#samples.find((sample) => sample.at >= last.at - MINUTE_S), last);
  }

  // One value of `measure`, a function of growth, for each five seconds; null where none is known.
  series(measure) {
    const last = this.#samples.at(-1);
    // On whole buckets, so that a value stays what it was as it moves to the left.
    const end = Math.floor(last.at / BUCKET_S) * BUCKET_S;
    const values = [];
    for (let at = end - KEPT_S; at < end; at += BUCKET_S) {
      const first = this.#before(at);
      const next = this.#before(at + BUCKET_S);
      const isKnown = first && next && next.at > first.at && at - first.at < BUCKET_S;
      values.push(isKnown ? measure(growth(first, next)) : null);
    }
    return values;
  }

  #before(at) {
    return this.#samples.findLast((sample) => sample.at <= at);
  }
}

function growth(first, last) {
  const grown = Object.entries(last).map(([name, value]) => (
    // An engine that left took its counts along.
    [name, Math.max(0, value - (first[name] ?? 0))]));
  const { at: seconds, ...more } = Object.fromEntries(grown);
  return { seconds, ...more };
}

export const perSecond = (name) => (grown) => (grown.seconds ? grown[name] / grown.seconds : 0);
