// The page of one server: choose a picture, perhaps a part of it, and see whether the collection shows it.

import { formAddress, readAddress } from "./address.js";
import { showAnswer } from "./answer.js";
import { showCollection } from "./collection.js";
import { announce, count, part, plural, shorten } from "./elements.js";
import { Frame } from "./frame.js";
import { HitView } from "./hit.js";
import { takePictures } from "./intake.js";
import { explain, explainWait, mayPass, VisitorError } from "./messages.js";
import { imageBody, readFile, readIndexedQuery } from "./pictures.js";
import { askBlob, askJson, askPatiently, hasKey, post, rememberKey } from "./server.js";
import { Visit } from "./visit.js";

const NUM_EXAMPLES = 12;
const TITLE = document.title;
const state = { index: null, entry: null, search: null, retry: null };
const limits = () => state.index?.limits ?? { body_limit_bytes: 16 * 2 ** 20, pixels: Infinity, max_k: Infinity };

const frame = new Frame(part("surface"), changeFrame);
const visit = new Visit({
  open: (entry) => attempt(() => openEntry(entry, "push")),
  openIndexed: (id) => attempt(() => openIndexed(id)),
});
const hitView = new HitView({
  searchWith: (id) => attempt(() => openIndexed(id)),
  closed: leaveHit,
  moved: (id) => remember("replace", id),
});

// Problems

async function attempt(action) {
  showProblem(null);
  try {
    await action();
  } catch (error) {
    if (error.name !== "AbortError") showProblem(error, action);
  }
}

function showProblem(error, action) {
  state.retry = error ? action : null;
  const needsKey = error?.status === 401;
  part("key-form").hidden = !needsKey;
  part("problem").hidden = !error || (needsKey && !hasKey());
  part("again").hidden = !error || !mayPass(error);
  part("problem-text").textContent = needsKey ? "This key is not known here." : error ? explain(error) : "";
  if (needsKey) part("key").focus();
  if (error) setBusy(null);
}

function retry() {
  const action = state.retry;
  if (action) attempt(action);
}

async function useKey(event) {
  event.preventDefault();
  rememberKey(part("key").value.trim());
  part("key").value = "";
  const action = state.retry;
  await attempt(loadCollection);
  if (action && action !== loadCollection && !state.retry) await attempt(action);
}

function setBusy(text) {
  document.body.classList.toggle("busy", text !== null);
  part("answer").setAttribute("aria-busy", String(text !== null));
  part("progress").hidden = text === null;
  part("progress-text").textContent = text ?? "";
  if (text !== null) announce(text);
}

// The collection

async function loadCollection() {
  state.index = await askJson("v1/index");
  const { images, version, uri_prefixes } = state.index;
  part("forget-key").hidden = !hasKey();
  part("server").textContent = `${plural(images, "picture")} · version ${version}`;
  part("url-form").hidden = !uri_prefixes.length;
  part("url").placeholder = `or an address: ${uri_prefixes[0]}…`;
  const examples = await askJson(`v1/examples?count=${NUM_EXAMPLES}`);
  showCollection(state.index, examples.images, (id) => attempt(() => openIndexed(id)));
}

function showStart() {
  state.search?.abort();
  setBusy(null);
  state.entry = null;
  document.title = TITLE;
  document.body.classList.add("start");
  for (const id of ["preview", "answer"]) part(id).hidden = true;
  part("prompt").hidden = part("collection").hidden = false;
}

// Queries

function begin(text) {
  hitView.dismiss();
  setBusy(text);
}

async function openFile(file) {
  begin("Reading the picture …");
  const query = await readFile(file, limits());
  await openEntry(visit.add(query, null, readAddress("").k), "push");
}

async function openUrl(uri) {
  begin("Fetching the picture …");
  const jpeg = await askBlob("v1/preview", post({ uri })).catch((error) => {
    throw error.status === 404 ? new VisitorError("There is no picture at this address.") : error;
  });
  await openFile(new File([jpeg], uri, { type: "image/jpeg" }));
}

async function openIndexed(id, { box = null, k = readAddress("").k, hit = null, record = "push" } = {}) {
  begin("Opening the picture …");
  const known = box ? null : visit.findIndexed(id);
  const entry = known ?? visit.add(await readIndexedQuery(id), box, k);
  await openEntry(entry, record, hit);
}

// `record`: how the browser's history takes it: push, replace, or null when it comes from there.
async function openEntry(entry, record, hit = null) {
  state.entry = entry;
  document.body.classList.remove("start");
  part("prompt").hidden = part("collection").hidden = true;
  part("preview").hidden = part("answer").hidden = false;
  part("image").src = entry.query.shown.url;
  part("query-name").textContent = shorten(entry.query.name);
  part("query-name").title = entry.query.name;
  frame.set(entry.box);
  showFrameState();
  remember(record, hit);
  // What was clicked may be gone: go on from the answer.
  part("answer").focus({ preventScroll: true });
  scrollTo(0, 0);
  if (entry.answer) {
    showEntryAnswer();
  } else {
    part("answer").replaceChildren();
    await search();
  }
  if (hit !== null && state.entry === entry) await hitView.open(entry, hit);
}

function changeFrame(box) {
  if (!state.entry) return;
  Object.assign(state.entry, { box, answer: null });
  showFrameState();
  remember("replace");
  attempt(search);
}

function showFrameState() {
  part("add-frame").hidden = frame.box !== null;
  part("clear-frame").hidden = frame.box === null;
}

async function search() {
  state.search?.abort();
  const { signal } = (state.search = new AbortController());
  const { entry } = state;
  part("answer").classList.add("old");
  setBusy(state.index ? `Searching ${count(state.index.images)} pictures …` : "Searching …");
  const [path, options] = await formRequest(entry, signal);
  const answer = await askPatiently(path, options, (error, wait_s) => setBusy(explainWait(error, wait_s))).catch((error) => {
    if (!signal.aborted) part("answer").replaceChildren(); // it belongs to another question
    throw error;
  });
  if (signal.aborted) return; // another question was asked meanwhile
  // A part of an indexed image is sent as an image: it finds itself.
  answer.hits = answer.hits.filter((hit) => hit.image_id !== entry.query.id);
  entry.answer = answer;
  showEntryAnswer();
  if (state.index && answer.version !== state.index.version) loadCollection().catch(() => {});
}

async function formRequest({ query, box, k: wanted }, signal) {
  const k = Math.min(wanted, limits().max_k);
  if (query.id !== null && !box) return [`v1/similar/${query.id}?k=${k}&group_copies=true`, { signal }];
  return ["v1/search", post({ ...(await imageBody(query, box)), k, group_copies: true }, signal)];
}

function showEntryAnswer() {
  const { entry } = state;
  setBusy(null);
  part("answer").classList.remove("old");
  entry.verdict = showAnswer(entry.answer, entry, state.index, { open: openHit, more: showMore, again: () => attempt(search) });
  document.title = `${entry.verdict.title}: ${shorten(entry.query.name)}`;
  visit.show(entry);
}

async function showMore() {
  const shown = document.querySelectorAll(".hit").length;
  state.entry.k = Math.min(2 * state.entry.k, limits().max_k);
  remember("replace");
  await attempt(search);
  document.querySelectorAll(".hit")[shown]?.focus();
}

// Hits and the browser's history

function openHit(hit) {
  remember("push", hit.image_id);
  hitView.open(state.entry, hit.image_id);
}

// Its entry in the browser's history goes with it, unless it is being left already.
function leaveHit() {
  if (history.state?.hit == null) return;
  if (history.state.opened) history.back();
  else remember("replace");
}

function remember(record, hit = null) {
  if (!record) return;
  const { number, query, box, k } = state.entry;
  const address = formAddress({ image: query.id, box, k, hit });
  const opened = hit !== null && (record === "push" || Boolean(history.state?.opened));
  history[`${record}State`]({ entry: number, hit, opened }, "", address);
}

function restore() {
  const { image, box, k, hit } = readAddress();
  const entry = visit.find(history.state?.entry);
  const opened = history.state?.hit ?? hit;
  if (entry === state.entry && entry) {
    if (opened !== null) hitView.open(entry, opened);
    else hitView.dismiss();
    return;
  }
  hitView.dismiss();
  if (entry) attempt(() => openEntry(entry, null, opened));
  else if (image !== null) attempt(() => openIndexed(image, { box, k, hit, record: "replace" }));
  else showStart();
}

part("key-form").addEventListener("submit", useKey);
part("forget-key").addEventListener("click", () => {
  rememberKey(null);
  location.reload();
});
part("again").addEventListener("click", retry);
part("add-frame").addEventListener("click", () => frame.start());
part("clear-frame").addEventListener("click", clearFrame);
addEventListener("popstate", restore);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !hitView.isOpen && !event.defaultPrevented) clearFrame();
});

function clearFrame() {
  if (frame.clear() && frame.box === null) part("add-frame").focus();
}

takePictures({
  file: (file) => attempt(() => openFile(file)),
  url: (uri) => attempt(() => openUrl(uri)),
  prefixes: () => state.index?.uri_prefixes ?? [],
  refuse: (error) => showProblem(error),
});

await attempt(loadCollection);
restore();
