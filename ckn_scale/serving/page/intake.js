// Ways a picture comes in: chosen, dropped, pasted, or by its address where the server fetches.

import { part } from "./elements.js";
import { VisitorError } from "./messages.js";

const NO_FILE = "That was not a picture file. Save the picture first, then drop its file here.";

// `actions`: file(file), url(uri), refuse(error); prefixes(): of addresses that the server fetches.
export function takePictures(actions) {
  watchChooser(actions);
  watchDrops(actions);
  watchPaste(actions);
  part("url-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const uri = part("url").value.trim();
    if (mayFetch(uri, actions)) actions.url(uri);
    else actions.refuse(new VisitorError(`Pictures are fetched only from ${actions.prefixes().join(", ")}`));
  });
}

function watchChooser(actions) {
  part("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    event.target.value = ""; // the same file again is a change too
    if (file) actions.file(file);
  });
  part("other").addEventListener("click", () => part("file").click());
}

// Anywhere on the page: a file dropped beside the field must not replace the page.
function watchDrops(actions) {
  const mark = (isOver) => document.body.classList.toggle("over", isOver);
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || mark(false));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    take(event.dataTransfer, actions, () => actions.refuse(new VisitorError(NO_FILE)));
  });
}

function watchPaste(actions) {
  document.addEventListener("paste", (event) => {
    if (event.target.closest?.("input")) return;
    take(event.clipboardData, actions, () => {});
  });
}

const mayFetch = (uri, actions) => actions.prefixes().some((prefix) => uri.startsWith(prefix));

function take(carried, actions, otherwise) {
  const file = carried?.files[0];
  const text = carried?.getData("text/uri-list") || carried?.getData("text/plain") || "";
  const uri = text.trim().split(/\r?\n/)[0];
  if (file) actions.file(file);
  else if (mayFetch(uri, actions)) actions.url(uri);
  else otherwise();
}
