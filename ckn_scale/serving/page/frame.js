// A frame on the query's image, in shares of its width and height. Drawn with the mouse, moved and resized with
// mouse, touch or keyboard: arrows move it, with Shift its lower right corner, on a handle that corner.

import { make } from "./elements.js";

const SMALLEST_PX = 16; // on the screen; less is a click, not a frame
const STEP = 0.02;
const KEY_PAUSE_MS = 600; // after the last key
const FIRST = [0.2, 0.2, 0.8, 0.8];
const CORNERS = { nw: "upper left", ne: "upper right", se: "lower right", sw: "lower left" };
const EDGES = ["n", "e", "s", "w"];
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

export class Frame {
  constructor(surface, onChange) {
    this.surface = surface;
    this.onChange = onChange;
    this.box = null;
    this.drag = null;
    this.hole = make("div", { className: "hole" });
    this.shade = make("div", { className: "shade", hidden: true }, this.hole);
    this.element = make("div", { className: "frame", hidden: true, tabIndex: 0, role: "group" }, ...makeHandles());
    surface.append(this.shade, this.element);
    surface.addEventListener("pointerdown", (event) => this.#press(event));
    surface.addEventListener("pointermove", (event) => this.#move(event));
    surface.addEventListener("pointerup", () => this.#release());
    surface.addEventListener("pointercancel", () => this.#cancel());
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  // Without a word to onChange.
  set(box) {
    this.box = box;
    this.element.hidden = this.shade.hidden = box === null;
    if (box === null) return;
    const [x1, y1, x2, y2] = box;
    for (const { style } of [this.element, this.hole]) {
      Object.assign(style, { left: `${100 * x1}%`, top: `${100 * y1}%` });
      Object.assign(style, { width: `${100 * (x2 - x1)}%`, height: `${100 * (y2 - y1)}%` });
    }
    const [left, top, right, bottom] = box.map((share) => Math.round(100 * share));
    this.element.setAttribute(
      "aria-label",
      `Frame from ${left} to ${right} % across and ${top} to ${bottom} % down. ` +
        "Arrow keys move it, with Shift they resize it, Escape removes it.",
    );
  }

  start() {
    this.set(FIRST);
    this.element.focus();
    this.onChange(this.box);
  }

  // True when there was one, or one was being drawn.
  clear() {
    clearTimeout(this.pause);
    if (this.drag) return this.#cancel();
    if (this.box === null) return false;
    this.set(null);
    this.onChange(null);
    return true;
  }

  #locate(event) {
    const area = this.surface.getBoundingClientRect();
    const x = clamp((event.clientX - area.left) / area.width, 0, 1);
    return [x, clamp((event.clientY - area.top) / area.height, 0, 1)];
  }

  #press(event) {
    if (event.button !== 0) return;
    const handle = event.target.dataset?.handle;
    const inside = this.element.contains(event.target);
    // A finger beside the frame scrolls the page.
    if (!inside && event.pointerType === "touch") return;
    event.preventDefault();
    this.surface.setPointerCapture(event.pointerId);
    const at = this.#locate(event);
    this.drag = { at, before: this.box, box: inside ? this.box : [...at, ...at], handle: handle ?? (inside ? "move" : "se") };
    if (inside) (handle in CORNERS ? event.target : this.element).focus({ preventScroll: true });
  }

  #move(event) {
    if (!this.drag) return;
    const { at, box, handle } = this.drag;
    const [x, y] = this.#locate(event);
    this.set(reshape(box, handle, x - at[0], y - at[1]));
  }

  #release() {
    if (!this.drag) return;
    const { before } = this.drag;
    this.drag = null;
    const area = this.surface.getBoundingClientRect();
    const [x1, y1, x2, y2] = this.box ?? [0, 0, 0, 0];
    const isSmall = (x2 - x1) * area.width < SMALLEST_PX || (y2 - y1) * area.height < SMALLEST_PX;
    if (isSmall) this.set(before);
    else if (this.box !== before) this.onChange(this.box);
  }

  #cancel() {
    if (this.drag) this.set(this.drag.before);
    this.drag = null;
    return true;
  }

  #key(event) {
    const arrow = ARROWS[event.key];
    if (!arrow) return;
    event.preventDefault();
    const handle = event.target.dataset.handle ?? (event.shiftKey ? "se" : "move");
    this.set(keepSize(reshape(this.box, handle, STEP * arrow[0], STEP * arrow[1])) ?? this.box);
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.box && this.onChange(this.box), KEY_PAUSE_MS);
  }
}

function makeHandles() {
  const corners = Object.entries(CORNERS).map(([handle, name]) =>
    make("button", { type: "button", className: `handle ${handle}`, "data-handle": handle, "aria-label": `${name} corner` }),
  );
  return [...EDGES.map((edge) => make("span", { className: `handle ${edge}`, "data-handle": edge })), ...corners];
}

// The box after one of its handles, or all of it, was moved by shares dx and dy; it never leaves the image.
export function reshape([x1, y1, x2, y2], handle, dx, dy) {
  if (handle === "move") {
    const [right, down] = [clamp(dx, -x1, 1 - x2), clamp(dy, -y1, 1 - y2)];
    return [x1 + right, y1 + down, x2 + right, y2 + down];
  }
  if (handle.includes("w")) x1 = clamp(x1 + dx, 0, 1);
  if (handle.includes("e")) x2 = clamp(x2 + dx, 0, 1);
  if (handle.includes("n")) y1 = clamp(y1 + dy, 0, 1);
  if (handle.includes("s")) y2 = clamp(y2 + dy, 0, 1);
  return [Math.min(x1, x2), Math.min(y1, y2), Math.max(x1, x2), Math.max(y1, y2)];
}

const keepSize = (box) => (box[2] - box[0] >= STEP && box[3] - box[1] >= STEP ? box : null);
