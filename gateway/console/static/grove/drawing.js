// Draws a tree as an icicle: depth in tokens to the right on a logarithmic scale, one strip per branch.
//
// A branch thinner than a pixel is drawn together with its neighbours, so a frame costs what is visible.

import { coloursOf } from "../theme.js";

const COLOURS = "private tenant public pinned bad text on-private on-tenant on-public accent".split(" ");
const GAP = 1;
const LABEL_HEIGHT = 15;
const LABEL_WIDTH = 64;
const MIN_HEIGHT = 0.75;
// Short prefixes get most of the room.
const UNIT_TOKENS = 24;

export class Drawing {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    // What is on the screen, for the pointer: [x, y, width, height, node].
    this.areas = [];
    this.readColours();
  }

  readColours() {
    this.colours = coloursOf(COLOURS);
    this.font = `12px ${getComputedStyle(this.canvas).fontFamily}`;
  }

  resize(width, height) {
    const ratio = devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  /** Draw what is below `focus`, itself included unless it is a root. */
  draw(tree, focus, selected) {
    const { context } = this;
    this.areas.length = 0;
    this.first = focus.data ? focus.data.depth - focus.data.edge : 0;
    this.scale = this.width / this.#log(Math.max(1, tree.depth - this.first));
    this.selected = selected;
    context.clearRect(0, 0, this.width, this.height);
    context.font = this.font;
    context.textBaseline = "middle";
    if (focus.data) this.#node(focus, 0, this.height);
    else this.#below(focus, 0, this.height);
    if (this.outline) this.#outline();
    this.outline = null;
  }

  /** The node at a place, or null. */
  at(x, y) {
    // Children come after their parents.
    for (let index = this.areas.length - 1; index >= 0; index--) {
      const [left, top, width, height, node] = this.areas[index];
      if (x >= left && x < left + width && y >= top && y < top + height) return node;
    }
    return null;
  }

  #log(tokens) {
    return Math.log1p(tokens / UNIT_TOKENS);
  }

  #x(depth) {
    return this.scale * this.#log(Math.max(0, depth - this.first));
  }

  #node(node, y, height) {
    const { data } = node;
    const x = this.#x(data.depth - data.edge);
    const width = Math.max(1, this.#x(data.depth) - x - GAP);
    const drawn = Math.max(1, height - (height > 4 ? GAP : 0));
    const { context, colours } = this;
    context.globalAlpha = data.state === "live" ? 1 : 0.5;
    context.fillStyle = colours[data.visibility] ?? colours.private;
    context.fillRect(x, y, width, drawn);
    context.globalAlpha = 1;
    if (data.pinned) this.#stripe(x, y, drawn, colours.pinned);
    if (data.quarantined || data.quarantined_tenants) this.#stripe(x, y, drawn, colours.bad);
    if (data.locks) {
      context.fillStyle = colours.accent;
      context.fillRect(x, y + drawn - 2, width, 2);
    }
    if (drawn >= LABEL_HEIGHT && width >= LABEL_WIDTH) this.#label(node, x, y, width, drawn);
    this.areas.push([x, y, width, height, node]);
    if (node === this.selected) this.outline = [x, y, width, drawn];
    this.#below(node, y, height);
  }

  #below(node, y, height) {
    const each = height / node.weight;
    let top = y;
    let drawnTo = y - MIN_HEIGHT;
    for (const children of [node.shared, node.own]) {
      for (const child of children) {
        const size = each * child.weight;
        const bottom = top + size;
        if (bottom - drawnTo >= MIN_HEIGHT) {
          if (child.data) this.#node(child, top, size);
          else this.#below(child, top, size);
          drawnTo = bottom;
        }
        top = bottom;
      }
    }
  }

  #stripe(x, y, height, colour) {
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, 4, height);
  }

  #label(node, x, y, width, height) {
    const { context, colours } = this;
    const { data } = node;
    const text = data.visibility === "private" ? `${data.edge}` : data.pinned ? `${data.edge} · pinned` : `${data.edge} · ${data.promoted_by ?? 0} users`;
    context.save();
    context.beginPath();
    context.rect(x, y, width - 4, height);
    context.clip();
    context.fillStyle = colours[`on-${data.visibility}`] ?? colours.text;
    context.fillText(text, x + 8, y + Math.min(height / 2, 40));
    context.restore();
  }

  #outline() {
    const [x, y, width, height] = this.outline;
    this.context.strokeStyle = this.colours.text;
    this.context.lineWidth = 2;
    this.context.strokeRect(x + 1, y + 1, Math.max(2, width - 2), Math.max(2, height - 2));
  }
}
