// Polls the daemon once a second while the page is visible, and shows when it does not answer.

import { show } from "./element.js";
import { clock, seconds, span } from "./number.js";
import { draw } from "./picture.js";

const PERIOD_MS = 1000;
const PERIOD_AWAY_MS = 2000;
const DEADLINE_MS = 4000;
const SIGNS = { live: "●", waiting: "○", away: "✕", paused: "‖" };

const LATE = new Error("timed out");
const LEFT = new Error("the page is hidden");

const element = (id) => document.getElementById(id);

let timer = 0;
let asking = null; // the request in flight
let last = null; // { at, told }: the time of the last document, and the document
let awaySince = null;
let isPaused = false;

async function ask() {
  if (asking) return;
  const question = asking = new AbortController();
  const askedAt = new Date();
  const deadline = setTimeout(() => question.abort(LATE), DEADLINE_MS);
  try {
    take(await fetched(question.signal));
  } catch (error) {
    if (error !== LEFT) miss(error, askedAt);
  } finally {
    clearTimeout(deadline);
    asking = null;
    rest();
  }
}

async function fetched(signal) {
  const options = { signal, cache: "no-store", credentials: "omit", redirect: "error" };
  const reply = await fetch("/status.json", options);
  if (reply.ok) return reply.json();
  const told = await reply.json().catch(() => null);
  throw new Error(told?.error?.message ?? `HTTP status ${reply.status}`);
}

function take(told) {
  if (last && last.told.version !== told.version) {
    location.reload(); // the page of another version may not know this document
    return;
  }
  last = { at: new Date(), told };
  try {
    draw(told);
  } catch (fault) {
    console.error(fault);
    throw new Error("this page cannot show the answer; reload it");
  }
  element("picture").hidden = false;
  awaySince = null;
  const net = told.worth.saved_s - told.worth.lost_s;
  document.title = `${seconds(Math.abs(net))} ${net < 0 ? "lost" : "saved"} · kvtier`;
  say("live", told.ready === false ? "not ready" : "live");
}

function miss(error, askedAt) {
  awaySince ??= askedAt;
  document.title = "no data · kvtier";
  const since = `since ${clock(awaySince)}`;
  // fetch throws a TypeError if nothing listens; its message has no details.
  say("away", error instanceof TypeError
    ? `no answer ${since}` : `no data ${since}: ${error.message}`);
}

const isWatching = () => !isPaused && !document.hidden;

function rest() {
  clearTimeout(timer);
  if (isWatching()) timer = setTimeout(ask, awaySince ? PERIOD_AWAY_MS : PERIOD_MS);
}

// Start or stop polling.
function attend() {
  clearTimeout(timer);
  if (isWatching()) {
    ask();
    return;
  }
  asking?.abort(LEFT);
  if (isPaused) say("paused", last ? `paused at ${clock(last.at)}` : "paused");
}

// Screen readers read this text, so it changes only if something happened.
function say(life, text) {
  element("life").dataset.life = life;
  element("picture").classList.toggle("stale", life === "away");
  show(element("said"), `${SIGNS[life]} ${text}`);
  tick();
}

function tick() {
  const isOld = awaySince && last;
  const since = isOld ? `· data is ${span((Date.now() - last.at) / 1000)} old` : "";
  show(element("since"), since);
}

element("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  element("pause").setAttribute("aria-pressed", String(isPaused));
  attend();
});
document.addEventListener("visibilitychange", attend);
show(element("where"), location.host);
setInterval(tick, PERIOD_MS);
attend();
