// Markdown of models and users as HTML that cannot run, load or send anything.

import { useLayoutEffect, useRef, html } from "./vendor/htm-preact.js";
import DOMPurify from "./vendor/dompurify.js";
import { marked } from "./vendor/marked.js";

const OPTIONS = { gfm: true, breaks: true };
const ALLOWED = {
  ALLOWED_TAGS: (
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s strong sub sup table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", "start", "title", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  // A region that scrolls must be reachable by keyboard.
  if (node.tagName === "PRE") {
    node.setAttribute("tabindex", "0");
    node.setAttribute("role", "region");
    node.setAttribute("aria-label", "Code");
  }
});

export function Markdown({ text }) {
  const place = useRef();
  useLayoutEffect(() => {
    place.current.innerHTML = DOMPurify.sanitize(marked.parse(text, OPTIONS), ALLOWED);
    // Headings of an answer are below those of the page.
    for (const heading of place.current.querySelectorAll("h1,h2,h3,h4,h5,h6")) {
      heading.setAttribute("role", "heading");
      heading.setAttribute("aria-level", String(Math.min(6, Number(heading.tagName[1]) + 2)));
    }
  }, [text]);
  return html`<div class="markdown" ref=${place}></div>`;
}
