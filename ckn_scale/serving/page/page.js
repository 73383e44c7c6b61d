"use strict";

// The page of one server: choose an image, perhaps a part of it, and see the most similar indexed ones.

const BODY_LIMIT_BYTES = 16 * 2 ** 20; // base64 makes a file a third larger
const FRAME_HINT = "Draw a frame on the image to search for a part of it.";
const SMALLEST_FRAME = 12; // screen pixels; less is a click, not a frame

const part = (id) => document.getElementById(id);
const state = { file: null, box: null, search: null, version: null, thumbnails: [] };

function authorised(headers = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

class ServerError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the server answered with status ${status}`);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: authorised(options.headers) });
  if (!answer.ok) throw new ServerError(answer.status, await answer.json().catch(() => null));
  return answer;
}

function showError(error) {
  part("key-form").hidden = error?.status !== 401;
  if (error?.status === 401) part("key").focus();
  const wrongKey = error?.status === 401 && sessionStorage.getItem("key");
  const silent = !error || (error.status === 401 && !wrongKey);
  part("error").hidden = Boolean(silent);
  if (!silent) part("error").textContent = wrongKey ? "The server does not know this key." : sentence(error);
}

function sentence(error) {
  if (error instanceof TypeError) return "The server cannot be reached. Is it still running?";
  return error.message.charAt(0).toUpperCase() + error.message.slice(1) + (/[.?!]$/.test(error.message) ? "" : ".");
}

function chooseFile(file) {
  if (!file) return;
  if (file.size * (4 / 3) > BODY_LIMIT_BYTES) {
    showError(new Error(`this file has ${(file.size / 2 ** 20).toFixed(1)} MiB; the server takes images up to 12 MiB`));
    return;
  }
  state.file = file;
  state.box = null;
  const image = part("image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.hidden = false;
  part("caption").textContent = FRAME_HINT;
  for (const [id, hidden] of [["prompt", true], ["preview", false], ["other", false], ["whole", true], ["box", true]]) {
    part(id).hidden = hidden;
  }
  part("drop").classList.add("filled");
  search();
}

function readBase64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error("the file cannot be read"));
    reader.readAsDataURL(file);
  });
}

async function search() {
  if (!state.file) return;
  state.search?.abort();
  const running = (state.search = new AbortController());
  showError(null);
  document.body.classList.add("busy");
  part("status").textContent = "Searching …";
  try {
    const query = { image: await readBase64(state.file), k: Number(part("k").value), box: state.box };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(query) };
    const answer = await (await ask("/v1/search", { ...options, signal: running.signal })).json();
    if (state.search === running) showAnswer(answer);
  } catch (error) {
    if (state.search === running) showFailure(error);
  } finally {
    if (state.search === running) document.body.classList.remove("busy");
  }
}

function showFailure(error) {
  clearHits();
  part("status").textContent = error.status === 401 ? "Waiting for the key." : "No answer.";
  showError(error);
}

function showAnswer(answer) {
  clearHits();
  const count = answer.hits.length;
  const what = count === 1 ? "1 hit" : `${count} hits`;
  part("status").textContent = `${what} in ${Math.round(answer.timings_ms.total)} ms`;
  if (answer.version !== state.version) showServer();
  part("partial").hidden = !answer.partial;
  part("partial").textContent =
    `Part of the index did not answer: ${(100 * answer.coverage).toFixed(0)} % of the images were searched.`;
  part("hits").append(...answer.hits.map(makeHit));
}

function clearHits() {
  for (const url of state.thumbnails.splice(0)) URL.revokeObjectURL(url);
  part("hits").replaceChildren();
  part("partial").hidden = true;
}

function makeHit(hit, position) {
  const item = part("hit").content.cloneNode(true).firstElementChild;
  item.querySelector(".rank").textContent = position + 1;
  item.querySelector(".score").textContent = hit.score.toFixed(3);
  item.querySelector(".bar span").style.width = `${100 * Math.min(Math.max(hit.score, 0), 1)}%`;
  const uri = item.querySelector(".uri");
  uri.textContent = shorten(hit.uri);
  uri.title = hit.uri;
  for (const [name, value] of Object.entries(hit.columns ?? {})) {
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = typeof value === "string" ? value : JSON.stringify(value);
    item.querySelector(".columns").append(term, text);
  }
  loadThumbnail(hit, item.querySelector(".thumb"));
  return item;
}

// The end of an address distinguishes images; the whole of it is the element's title.
function shorten(uri) {
  const parts = uri.split("/");
  return parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : uri;
}

async function loadThumbnail(hit, frame) {
  try {
    // Fetched, not linked, because a link cannot carry the key.
    const jpeg = await (await ask(`/v1/images/${hit.image_id}/thumbnail`)).blob();
    const url = URL.createObjectURL(jpeg);
    state.thumbnails.push(url);
    const image = frame.querySelector("img");
    image.src = url;
    image.alt = `thumbnail of ${hit.uri}`;
    image.hidden = false;
    frame.querySelector("span").hidden = true;
  } catch (error) {
    frame.querySelector("span").textContent = error.status === 404 ? "no thumbnail" : "thumbnail not available";
  }
}

function watchFrame() {
  const canvas = part("canvas");
  let start = null;
  const place = (event) => {
    const area = part("image").getBoundingClientRect();
    const within = (value, end) => Math.min(Math.max(value, 0), end);
    return [within(event.clientX - area.left, area.width), within(event.clientY - area.top, area.height)];
  };
  const corners = (end) => [0, 1].flatMap((axis) => [Math.min(start[axis], end[axis]), Math.max(start[axis], end[axis])]);
  canvas.addEventListener("pointerdown", (event) => {
    start = place(event);
    canvas.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (start) drawFrame(...corners(place(event)));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!start) return;
    const [left, right, top, bottom] = corners(place(event));
    start = null;
    if (right - left < SMALLEST_FRAME || bottom - top < SMALLEST_FRAME) return useWholeImage();
    const image = part("image");
    const [across, down] = [image.naturalWidth / image.clientWidth, image.naturalHeight / image.clientHeight];
    state.box = [left * across, top * down, right * across, bottom * down].map(Math.round);
    part("whole").hidden = false;
    search();
  });
  canvas.addEventListener("pointercancel", () => {
    start = null;
    useWholeImage();
  });
}

function drawFrame(left, right, top, bottom) {
  const box = part("box");
  box.hidden = false;
  Object.assign(box.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
}

function useWholeImage() {
  const changed = state.box !== null;
  state.box = null;
  part("box").hidden = true;
  part("whole").hidden = true;
  if (changed) search();
}

function watchDrops() {
  const drop = part("drop");
  // Anywhere on the page: a file dropped beside the field must not replace the page.
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) drop.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const file = event.dataTransfer.files[0];
    file ? chooseFile(file) : showError(new Error("that was no file: drop an image file"));
  });
  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])][0];
    if (file) chooseFile(file);
  });
}

async function showServer() {
  try {
    const { version, images } = await (await fetch("/readyz")).json();
    state.version = version;
    part("server").textContent = `${images.toLocaleString("en")} images · index version ${version}`;
  } catch {
    part("server").textContent = "server not reachable";
  }
}

part("file").addEventListener("change", (event) => {
  chooseFile(event.target.files[0]);
  event.target.value = ""; // the same file again is a change too
});
part("other").addEventListener("click", () => part("file").click());
part("whole").addEventListener("click", useWholeImage);
part("k").addEventListener("change", search);
part("image").addEventListener("error", () => {
  // The server may read formats that this browser cannot show.
  part("image").hidden = true;
  part("caption").textContent = `${state.file.name}: no preview`;
});
part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", part("key").value.trim());
  part("key-form").hidden = true;
  search();
});
watchFrame();
watchDrops();
showServer();
