// Image files: what of them this browser can show, and what is sent to the server.

import { ask, askBlob, askJson } from "./server.js";
import { VisitorError } from "./messages.js";

const SHRUNK_SIDE_PX = 2048; // of pictures that are too large to send
const KEPT_THUMBNAILS = 500;
const thumbnails = new Map(); // id → promise of an object URL

// An object URL of an indexed image's thumbnail.
export function loadThumbnail(id) {
  if (!thumbnails.has(id)) {
    const loading = askBlob(`v1/images/${id}/thumbnail`).then((jpeg) => URL.createObjectURL(jpeg));
    thumbnails.set(id, loading);
    loading.catch(() => thumbnails.delete(id));
    if (thumbnails.size > KEPT_THUMBNAILS) forgetOldest();
  }
  return thumbnails.get(id);
}

function forgetOldest() {
  const [id, loading] = thumbnails.entries().next().value;
  thumbnails.delete(id);
  loading.then((url) => URL.revokeObjectURL(url), () => {});
}

// { url, width, height } of an image that this browser can show, upright; null when it cannot.
export async function decode(blob) {
  const url = URL.createObjectURL(blob);
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
    if (image.naturalWidth) return { url, width: image.naturalWidth, height: image.naturalHeight };
  } catch {
    // not a format of this browser
  }
  URL.revokeObjectURL(url);
  return null;
}

// As decode; what this browser cannot show, such as HEIC, the server turns into a JPEG and tells its size.
async function decodeOrPreview(file, limit_bytes) {
  const shown = await decode(file);
  if (shown) return { shown, width: shown.width, height: shown.height };
  if (file.size > limit_bytes) throw new VisitorError("This file is too large to send. Try a smaller version of it.");
  const headers = { "Content-Type": "application/octet-stream" };
  const answer = await ask("v1/preview", { method: "POST", headers, body: file });
  const [width, height] = ["x-image-width", "x-image-height"].map((name) => Number(answer.headers.get(name)));
  return { shown: await decode(await answer.blob()), width, height };
}

// A file of the visitor as a query: what is shown of it, and what is sent, with its size in pixels.
export async function readFile(file, limits) {
  if (!file.size) throw new VisitorError("This file is empty.");
  const limit_bytes = Math.floor((limits.body_limit_bytes - 4096) * 0.74); // base64 makes a file a third larger
  const { shown, width, height } = await decodeOrPreview(file, limit_bytes);
  const isTooLarge = file.size > limit_bytes || width * height > limits.pixels;
  const sent = isTooLarge ? await shrink(shown) : { blob: file, width, height };
  return { name: file.name || "pasted picture", id: null, shown, sent };
}

async function shrink({ url, width, height }) {
  const scale = Math.min(1, SHRUNK_SIDE_PX / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(scale * width);
  canvas.height = Math.round(scale * height);
  const image = new Image();
  image.src = url;
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return { blob, width: canvas.width, height: canvas.height };
}

// An indexed image: what the server says of it, and its original where that may be seen, else its thumbnail.
export async function readIndexed(id) {
  const facts = await askJson(`v1/images/${id}`);
  const original = facts.original ? await readOriginal(id) : null;
  const blob = original?.blob ?? (await askBlob(`v1/images/${id}/thumbnail`));
  const shown = original?.shown ?? (await decode(blob));
  return { facts, blob, shown, isOriginal: Boolean(original) };
}

async function readOriginal(id) {
  try {
    const blob = await askBlob(`v1/images/${id}/original`);
    const shown = await decode(blob);
    return shown && { blob, shown };
  } catch {
    return null; // moved or deleted since it was indexed: the thumbnail is still there
  }
}

// An indexed image as a query.
export async function readIndexedQuery(id) {
  const { facts, blob, shown } = await readIndexed(id);
  return { name: facts.uri, id, shown, sent: { blob, width: shown.width, height: shown.height } };
}

// The fields "image" and "box" of a request about a query, or the part of it in a frame.
export async function imageBody({ sent }, frame) {
  const image = await toBase64(sent.blob);
  if (!frame) return { image };
  return { image, box: frame.map((share, i) => share * (i % 2 ? sent.height : sent.width)) };
}

function toBase64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new VisitorError("This file cannot be read. Was it moved or deleted?"));
    reader.readAsDataURL(blob);
  });
}
