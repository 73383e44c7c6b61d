// The searches of this visit, newest first, to go back to. They are kept in this tab only; of those, searches with
// indexed images outlast a reload.

import { make, part, shorten } from "./elements.js";
import { loadThumbnail } from "./pictures.js";

const KEPT = 12;

export class Visit {
  // `actions`: open(entry), openIndexed(id).
  constructor(actions) {
    this.actions = actions;
    this.entries = [];
    this.earlier = readEarlier(); // { id, name, kind, title } from before a reload
    this.last = Date.now(); // numbers of before a reload are in the browser's history still
  }

  add(query, box, k) {
    const entry = { number: ++this.last, query, box, k, answer: null, verdict: null };
    this.entries.unshift(entry);
    for (const old of this.entries.splice(KEPT)) URL.revokeObjectURL(old.query.shown.url);
    return entry;
  }

  find(number) {
    return this.entries.find((entry) => entry.number === number) ?? null;
  }

  findIndexed(id) {
    return this.entries.find((entry) => entry.query.id === id && !entry.box) ?? null;
  }

  show(current) {
    const answered = this.entries.filter((entry) => entry.verdict);
    const here = new Set(answered.map((entry) => entry.query.id));
    const earlier = this.earlier.filter(({ id }) => !here.has(id)).slice(0, KEPT - answered.length);
    const buttons = answered.map((entry) => this.#makeButton(entry, current));
    buttons.push(...earlier.map((one) => this.#makeEarlier(one)));
    part("visit").hidden = buttons.length < 2;
    part("visit-list").replaceChildren(...buttons.map((button) => make("li", {}, button)));
    const indexed = answered.filter((entry) => entry.query.id !== null).map(summarise);
    sessionStorage.setItem("visit", JSON.stringify([...indexed, ...earlier]));
  }

  #makeButton(entry, current) {
    const image = make("img", { src: entry.query.shown.url, alt: "", draggable: false });
    const button = makeButton(summarise(entry), image, () => this.actions.open(entry));
    if (entry === current) button.setAttribute("aria-current", "true");
    return button;
  }

  #makeEarlier(summary) {
    const image = make("img", { alt: "", draggable: false });
    loadThumbnail(summary.id).then((url) => (image.src = url), () => {});
    return makeButton(summary, image, () => this.actions.openIndexed(summary.id));
  }
}

function makeButton({ name, kind, title }, image, onclick) {
  const label = { title: name, "aria-label": `${shorten(name)}: ${title}` };
  return make("button", { type: "button", className: `example ${kind}`, onclick, ...label }, image);
}

const summarise = ({ query, verdict }) => ({
  id: query.id, name: query.name, kind: verdict.kind, title: verdict.title,
});

function readEarlier() {
  try {
    return JSON.parse(sessionStorage.getItem("visit")) ?? [];
  } catch {
    return [];
  }
}
