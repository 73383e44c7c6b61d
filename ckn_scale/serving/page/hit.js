// A hit, opened: both images large, their verified matches, registered on each other, and what is known of it.

import { announce, count, describeColumn, make, oneIn, part, plural, shorten } from "./elements.js";
import { Comparison } from "./compare.js";
import { describePlaces, showThumbnail } from "./answer.js";
import { explain } from "./messages.js";
import { imageBody, readIndexed } from "./pictures.js";
import { askPatiently, formUrl, hasKey, post } from "./server.js";

const VIEWS = ["matches", "registered"];

export class HitView {
  // `actions`: searchWith(id), closed(), moved(id).
  constructor(actions) {
    this.actions = actions;
    this.dialog = part("hit");
    this.urls = []; // of what is shown, to be released
    this.comparison = new Comparison(part("stage"));
    this.dialog.addEventListener("close", () => this.#closed());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.close());
    this.dialog.addEventListener("keydown", (event) => this.#key(event));
    part("close").addEventListener("click", () => this.close());
    part("previous").addEventListener("click", () => this.#step(-1));
    part("next").addEventListener("click", () => this.#step(1));
    part("fade").addEventListener("input", () => this.#fade(part("fade").valueAsNumber));
    part("flip").addEventListener("click", () => this.#fade(part("fade").valueAsNumber < 50 ? 100 : 0));
    part("with-this").addEventListener("click", () => this.#searchWithThis());
    part("copy").addEventListener("click", () => this.#copy());
    for (const view of VIEWS) part(`view-${view}`).addEventListener("change", () => this.#setView(view));
  }

  get isOpen() {
    return this.dialog.open;
  }

  // `id` may be a hit, one of its copies, or, from a link, any indexed image.
  async open(entry, id) {
    this.abort?.abort();
    const { signal } = (this.abort = new AbortController());
    Object.assign(this, { entry, id, hit: findHit(entry, id), picture: null });
    this.#release();
    this.#showKnown();
    if (!this.dialog.open) {
      this.opener = document.activeElement;
      this.dialog.showModal();
      part("hit-title").focus();
    }
    try {
      const picture = await readIndexed(id);
      this.urls.push(picture.shown.url);
      if (signal.aborted) return;
      this.picture = picture;
      this.#showFacts(picture);
      this.comparison.show([entry.query.shown, picture.shown], null, entry.box);
      part("stage").classList.remove("waiting");
      const match = await askPatiently("v1/match", post(await matchBody(entry, id), signal), () => {});
      if (!signal.aborted) this.#showMatch(match);
    } catch (error) {
      if (!signal.aborted) this.#showVerdict("weak", explain(error));
    }
  }

  close() {
    this.dialog.close();
  }

  // Because the page goes elsewhere: nothing is to be done about it.
  dismiss() {
    this.isDismissed = this.dialog.open;
    this.dialog.close();
  }

  #closed() {
    this.abort?.abort();
    if (!this.isDismissed) this.actions.closed();
    this.isDismissed = false;
    const card = document.querySelector(`[data-image="${this.hit?.image_id ?? this.id}"]`);
    (card ?? this.opener)?.focus();
  }

  #showKnown() {
    part("hit-title").textContent = shorten(this.hit?.uri ?? "Picture");
    part("stage").classList.add("waiting");
    part("uri").textContent = this.hit?.uri ?? "";
    part("original").hidden = true;
    part("registering").hidden = part("view-choice").hidden = true;
    this.#showVerdict("waiting", "Comparing the two pictures …");
    part("facts").replaceChildren();
    this.#showCopies();
    const [before, after] = [this.#neighbour(-1), this.#neighbour(1)];
    part("previous").disabled = before === undefined;
    part("next").disabled = after === undefined;
  }

  #showFacts({ facts, blob, isOriginal }) {
    part("hit-title").textContent = shorten(facts.uri);
    part("uri").textContent = facts.uri;
    const known = { ...facts.columns };
    if (facts.width) known["size"] = `${count(facts.width)} × ${count(facts.height)} pixels`;
    const rows = Object.entries(known).flatMap(([name, value]) => [
      make("dt", { textContent: name }),
      make("dd", { textContent: describeColumn(value) }),
    ]);
    part("facts").replaceChildren(...rows);
    part("original").hidden = !facts.original;
    part("original").href = this.#formOriginal(isOriginal ? blob : null);
  }

  // A link cannot carry a key: with one, it leads to what was fetched.
  #formOriginal(blob) {
    if (!hasKey() || !blob) return formUrl(`v1/images/${this.id}/original`);
    const type = /^image\/(?!svg)/.test(blob.type) ? blob.type : "application/octet-stream";
    const url = URL.createObjectURL(new Blob([blob], { type }));
    this.urls.push(url);
    return url;
  }

  #release() {
    for (const url of this.urls.splice(0)) URL.revokeObjectURL(url);
  }

  #showMatch(match) {
    const { entry, picture } = this;
    const { width, height } = entry.query.sent;
    // With a frame the first size is the frame's, but places are those of the whole picture, which is shown.
    const whole = entry.box ? { ...match, sizes: [[width, height], match.sizes[1]] } : match;
    this.comparison.show([entry.query.shown, picture.shown], whole, entry.box);
    part("view-choice").hidden = !this.comparison.canRegister;
    const { min_inliers, false_alarm_rate } = match.decision ?? {};
    const places = describePlaces(match.inliers);
    if (match.match) {
      this.#showVerdict("found", `The same thing: ${places}, ${min_inliers} are enough (chance: ${oneIn(false_alarm_rate)}).`);
    } else {
      this.#showVerdict("weak", `Not enough evidence that both show the same thing: ${places}, a match needs ${min_inliers}.`);
    }
    this.#setView(this.comparison.view);
    this.#fade(50);
  }

  #showVerdict(kind, text) {
    part("hit-verdict").className = `hit-verdict ${kind}`;
    part("hit-verdict").textContent = text;
    announce(text, "hit-status");
  }

  #showCopies() {
    const ids = this.hit?.copies?.length ? [this.hit.image_id, ...this.hit.copies] : [];
    part("copies").hidden = !ids.length;
    part("copy-list").replaceChildren(...ids.map((id) => make("li", {}, this.#makeCopy(id))));
  }

  #makeCopy(id) {
    const image = make("img", { alt: "", draggable: false });
    const isThis = id === this.id;
    const name = isThis ? `Copy ${id}, shown now` : `Show copy ${id}`;
    const open = () => this.#goTo(id);
    const button = make("button", { type: "button", className: "example", "aria-label": name, disabled: isThis, onclick: open }, image);
    showThumbnail(id, image, button);
    return button;
  }

  #setView(view) {
    part(`view-${view}`).checked = true;
    this.comparison.setView(view);
    part("registering").hidden = view !== "registered";
    const shown = this.comparison.match?.matches?.length ?? 0;
    const beside = `Both pictures beside each other, ${plural(shown, "matching place")} joined by lines`;
    part("stage").setAttribute("aria-label", view === "matches" ? beside : "Both pictures laid on each other");
  }

  #fade(value) {
    part("fade").value = value;
    this.comparison.setFade(value / 100);
    part("flip").textContent = value < 50 ? "Show theirs" : "Show yours";
  }

  #neighbour(step) {
    const ids = this.entry.answer?.hits.map((hit) => hit.image_id) ?? [];
    const here = ids.indexOf(this.hit?.image_id ?? this.id);
    return here < 0 ? undefined : ids[here + step];
  }

  #step(step) {
    const id = this.#neighbour(step);
    if (id !== undefined) this.#goTo(id);
  }

  #goTo(id) {
    this.actions.moved(id);
    this.open(this.entry, id);
    part("hit-title").focus();
  }

  #key(event) {
    if (event.target.matches("input")) return;
    if (event.key === "ArrowLeft") this.#step(-1);
    if (event.key === "ArrowRight") this.#step(1);
  }

  #searchWithThis() {
    this.actions.searchWith(this.id);
  }

  async #copy() {
    const text = part("uri").textContent;
    try {
      await navigator.clipboard.writeText(text);
      part("copy").textContent = "Copied";
      announce("Address copied", "hit-status");
    } catch {
      getSelection().selectAllChildren(part("uri"));
      part("copy").textContent = "Press Ctrl C";
    }
    setTimeout(() => (part("copy").textContent = "Copy"), 2000);
  }
}

const findHit = (entry, id) =>
  entry.answer?.hits.find((hit) => hit.image_id === id || hit.copies?.includes(id)) ?? null;

async function matchBody({ query, box }, id) {
  if (query.id !== null && !box) return { image_id: query.id, other_id: id };
  return { ...(await imageBody(query, box)), image_id: id };
}
