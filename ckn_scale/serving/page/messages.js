// What went wrong, in words for a visitor.

const IMAGE_PROBLEMS = {
  unsupported: "This file is not a picture that can be read here. Try a JPEG, PNG, WebP or HEIC file.",
  corrupt: "This picture file is damaged and cannot be read.",
  truncated: "This picture file is incomplete: its end is missing. Was it downloaded completely?",
  too_large: "This picture has too many pixels. Try a smaller version of it.",
  empty: "This file is empty.",
  no_keypoints: "There is nothing in this picture to recognise: it is all one colour or very smooth.",
  timeout: "Reading this picture took too long. Try a smaller version of it.",
  crashed: "This picture cannot be read.",
};

const PROBLEMS = {
  403: "This is not allowed here, or not with your key.",
  404: "This picture is not in the collection, or not any more.",
  408: "Sending the picture took too long. Is your connection slow?",
  413: "This picture file is too large to send. Try a smaller version of it.",
  429: "Many people are searching at the moment. Please try again in a few seconds.",
  503: "The collection cannot be searched just now: a part of it is starting again. Please try again in a moment.",
};

const BUSY = { 429: "Many people are searching at the moment", 503: "A part of the collection is starting again" };

export class VisitorError extends Error {} // its message is a sentence for the visitor

export function explain(error) {
  if (error instanceof VisitorError) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached. Are you connected?";
  if (error.status === 422) return IMAGE_PROBLEMS[error.details.state] ?? "This picture cannot be used.";
  if (PROBLEMS[error.status]) return PROBLEMS[error.status];
  const reference = error.reference ? ` Its operator may find out why: the reference is ${error.reference}.` : "";
  return `Something went wrong on the server.${reference}`;
}

export const explainWait = (error, wait_s) => `${BUSY[error.status]}: trying again in ${Math.ceil(wait_s)} s …`;

// Whether asking once more may help, without changing anything.
export const mayPass = (error) => error instanceof TypeError || [408, 429, 500, 503].includes(error.status);
