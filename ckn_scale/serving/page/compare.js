// Two images on a stage: beside each other with their verified matches, or registered on each other.

import { apply, fitBeside, fitRegistered, multiply, placing, scaling, toCss } from "./geometry.js";

const ELEMENT_SIDE_PX = 800; // of an image before its transform
const GAP_PX = 24;
const MOST_LINES = 200; // drawn; more only cover the images
const part = (stage, name) => stage.querySelector(name);

export class Comparison {
  constructor(stage) {
    this.stage = stage;
    this.images = [part(stage, ".theirs"), part(stage, ".ours")];
    this.canvas = part(stage, "canvas");
    this.view = "matches";
    new ResizeObserver(() => this.draw()).observe(stage);
  }

  // `pictures` are { url, width, height } of the query and the hit; `match` as /v1/match answers, null until it has.
  show(pictures, match, box) {
    const [theirs, ours] = pictures;
    Object.assign(this, { match, box, sizes: match?.sizes ?? [theirs, ours].map((one) => [one.width, one.height]) });
    pictures.forEach((picture, i) => {
      if (this.images[i].src !== picture.url) this.images[i].src = picture.url;
    });
    if (!this.canRegister) this.view = "matches";
    this.draw();
  }

  get canRegister() {
    return Boolean(this.match?.transform);
  }

  setView(view) {
    this.view = view;
    this.draw();
  }

  // From 0, the query alone, to 1, the hit alone.
  setFade(share) {
    this.images[0].style.setProperty("--fade", String(1 - share));
  }

  draw() {
    if (!this.sizes || !this.stage.clientWidth) return;
    const area = [this.stage.clientWidth, this.stage.clientHeight];
    this.stage.classList.toggle("registered", this.view === "registered");
    const places = this.view === "registered" ? this.#placeRegistered(area) : this.#placeBeside(area);
    places.forEach((place, i) => this.#position(i, place));
    this.#drawLines(area, places);
  }

  #placeBeside(area) {
    return fitBeside(area, this.sizes, GAP_PX).map(({ scale, x, y }) => placing(scale, x, y));
  }

  #placeRegistered(area) {
    const { transform } = this.match;
    const { scale, x, y } = fitRegistered(area, [this.sizes[1], this.sizes[0]], transform);
    const place = placing(scale, x, y);
    return [multiply(place, transform), place];
  }

  // `place` maps the image's own pixels to the stage; the element has a size of its own.
  #position(i, place) {
    const [width, height] = this.sizes[i];
    const scale = ELEMENT_SIDE_PX / Math.max(width, height);
    const { style } = this.images[i];
    Object.assign(style, { width: `${scale * width}px`, height: `${scale * height}px` });
    style.transform = toCss(multiply(place, scaling(1 / scale, 1 / scale)));
  }

  #drawLines([width, height], places) {
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    if (this.view === "registered") return;
    ["yours", "theirs"].forEach((label, i) => drawLabel(pen, label, apply(places[i], [0, 0])));
    if (this.box) drawFrame(pen, this.box, this.sizes[0], places[0]);
    const matches = thinOut(this.match?.matches ?? [], MOST_LINES);
    for (const [x, y, u, v] of matches) {
      const hue = Math.round((300 * y) / this.sizes[0][1]);
      drawMatch(pen, apply(places[0], [x, y]), apply(places[1], [u, v]), hue);
    }
  }
}

function thinOut(matches, most) {
  const step = Math.max(1, matches.length / most);
  return Array.from({ length: Math.min(most, matches.length) }, (_, i) => matches[Math.floor(i * step)]);
}

function drawMatch(pen, from, to, hue) {
  pen.strokeStyle = `hsl(${hue} 90% 60% / 55%)`;
  pen.lineWidth = 1.25;
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
  for (const [x, y] of [from, to]) {
    pen.beginPath();
    pen.arc(x, y, 3, 0, 2 * Math.PI);
    pen.fillStyle = `hsl(${hue} 90% 60%)`;
    pen.fill();
    pen.strokeStyle = "rgb(0 0 0 / 60%)";
    pen.lineWidth = 1;
    pen.stroke();
  }
}

function drawLabel(pen, label, [x, y]) {
  pen.font = "600 13px system-ui, sans-serif";
  pen.fillStyle = "rgb(10 14 24 / 78%)";
  pen.fillRect(x, y, pen.measureText(label).width + 16, 24);
  pen.fillStyle = "#fff";
  pen.fillText(label, x + 8, y + 16.5);
}

function drawFrame(pen, [x1, y1, x2, y2], [width, height], place) {
  const [left, top] = apply(place, [x1 * width, y1 * height]);
  const [right, bottom] = apply(place, [x2 * width, y2 * height]);
  for (const [style, dash] of [["rgb(0 0 0 / 70%)", []], ["#fff", [6, 4]]]) {
    pen.strokeStyle = style;
    pen.lineWidth = 2;
    pen.setLineDash(dash);
    pen.strokeRect(left, top, right - left, bottom - top);
  }
  pen.setLineDash([]);
}
