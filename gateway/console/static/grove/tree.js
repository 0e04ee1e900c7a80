// The prefix caches' nodes, kept up to date by events, and the recent past of each. From before the first snapshot, only
// decisions are known: what was shared with whom, but neither what was added nor what was dropped.
//
// Layout needs the number of leaves below each node; it is kept with every change, in time proportional to the depth.

const MAX_LOG = 20_000;

class Node {
  constructor(key, group) {
    this.key = key;
    this.group = group;
    this.data = null;
    this.parent = null;
    // Shared children are drawn first, so that thousands of private ones do not hide them.
    this.shared = new Set();
    this.own = new Set();
    this.below = 0;
    this.weight = 1;
  }

  get isShared() {
    return this.data !== null && this.data.visibility !== "private";
  }

  *children() {
    yield* this.shared;
    yield* this.own;
  }
}

export class Tree {
  constructor() {
    this.root = new Node("", "");
    this.groups = new Map();
    this.nodes = new Map();
    this.totals = new Totals();
    this.depth = 0;
  }

  get size() {
    return this.nodes.size;
  }

  group(name) {
    let root = this.groups.get(name);
    if (!root) {
      root = new Node(name, name);
      this.groups.set(name, root);
      this.#attach(root, this.root);
    }
    return root;
  }

  get(group, id) {
    return this.nodes.get(`${group}:${id}`);
  }

  /** Insert or change a node; `data` without `edge` removes it. Returns what it was before, or null. */
  put(group, id, data) {
    const key = `${group}:${id}`;
    const known = this.nodes.get(key);
    const before = known?.data ?? null;
    if (!data?.edge) {
      if (known) this.#remove(known);
      return before;
    }
    const parent = this.nodes.get(`${group}:${data.parent}`) ?? this.group(group);
    const node = known ?? new Node(key, group);
    if (known) {
      this.totals.add(known.data, -1);
      this.#detach(known);
    } else this.nodes.set(key, node);
    node.data = data;
    this.#attach(node, parent);
    this.totals.add(data, 1);
    if (data.depth > this.depth) this.depth = data.depth;
    return before;
  }

  /** Change figures of a node that do not affect its place. */
  count(group, data) {
    const node = this.get(group, data.id);
    if (node) node.data = { ...node.data, ...figures(data) };
  }

  clear(group) {
    for (const node of [...this.nodes.values()]) {
      if (node.group !== group) continue;
      this.totals.add(node.data, -1);
      this.nodes.delete(node.key);
    }
    const root = this.groups.get(group);
    if (root) {
      this.#detach(root);
      this.groups.delete(group);
    }
  }

  #remove(node) {
    this.totals.add(node.data, -1);
    this.#detach(node);
    this.nodes.delete(node.key);
    // Events of its children follow, if any are left.
    const root = this.group(node.group);
    for (const child of [...node.children()]) {
      child.parent = null;
      this.#attach(child, root);
    }
  }

  #attach(node, parent) {
    node.parent = parent;
    (node.isShared ? parent.shared : parent.own).add(node);
    grow(parent, node.weight);
  }

  #detach(node) {
    const { parent } = node;
    if (!parent) return;
    parent.shared.delete(node);
    parent.own.delete(node);
    node.parent = null;
    grow(parent, -node.weight);
  }
}

function grow(node, leaves) {
  for (let change = leaves; node && change; node = node.parent) {
    node.below += change;
    const weight = Math.max(1, node.below);
    change = weight - node.weight;
    node.weight = weight;
  }
}

const FIGURES = ["hits", "users", "previous_hits", "previous_users", "epoch", "creators", "locks", "used", "quarantined"];
const figures = (data) => Object.fromEntries(FIGURES.map((name) => [name, data[name]]));

/** Pages and nodes by visibility and by tenant, and pages by tier. */
export class Totals {
  constructor() {
    this.visibility = new Map();
    this.tenant = new Map();
    this.pages = { device: 0, host: 0 };
  }

  add(data, sign) {
    const device = data.pages ?? 0;
    const host = data.host_pages ?? 0;
    this.pages.device += sign * device;
    this.pages.host += sign * host;
    const { tenant: named, fingerprint = "unknown" } = data.owner ?? {};
    const tenant = data.visibility === "public" ? "everyone" : (named ?? `#${fingerprint.slice(0, 8)}`);
    for (const [map, name] of [[this.visibility, data.visibility], [this.tenant, tenant]]) {
      const sums = map.get(name) ?? { nodes: 0, pages: 0, tokens: 0 };
      sums.nodes += sign;
      sums.pages += sign * (device + host);
      sums.tokens += sign * data.edge;
      if (sums.nodes) map.set(name, sums);
      else map.delete(name);
    }
  }
}

// What decisions change of a node.
const SHARING = ["visibility", "owner", "creators", "promoted_by", "promoted_epoch", "promoted_tenants", "pinned", "quarantined", "quarantined_tenants", "generation"];
const sharing = (data) => Object.fromEntries(SHARING.map((name) => [name, data[name]]));
const UNSHARED = sharing({ visibility: "private", owner: {} });
const SHOWN_TO_ALL = { quarantined: 0, quarantined_tenants: 0 };

/** Find the state of the node before and after each of a group's `decisions`, oldest first, that led to `tree`. */
function trace(decisions, tree) {
  const latest = new Map();
  const earlier = decisions.map(({ id, data }) => {
    const found = latest.get(id) ?? null;
    latest.set(id, data);
    return found;
  });
  const states = new Map();
  for (let index = decisions.length - 1; index >= 0; index--) {
    const decision = decisions[index];
    const { group, id } = decision;
    const present = tree.get(group, id)?.data ?? null;
    decision.after = states.has(id) ? states.get(id) : present;
    decision.before = undone(decision, earlier[index], present !== null);
    states.set(id, decision.before);
  }
}

/** The node before a decision; null: there was none, or it cannot be shown, as it has been dropped since. */
function undone({ kind, after }, earlier, isPresent) {
  // Demoted nodes are removed; text of their users continues in others.
  if (kind === "demoted") return earlier;
  if (!after) return null;
  if (earlier) return { ...after, ...sharing(earlier) };
  if (kind === "quarantined") return { ...after, ...SHOWN_TO_ALL };
  return isPresent ? { ...after, ...UNSHARED } : null;
}

/** A tree with its recent past: `at` of the logged events are applied, all of them while it is live. */
export class History {
  constructor() {
    this.tree = new Tree();
    this.log = [];
    this.at = 0;
    this.isLive = true;
    // By group whose snapshot is arriving, the decisions from before it.
    this.loading = new Map();
    this.changes = 0;
  }

  /** Take a message of the gateway: { group, reset, past, events, counters }, received at `time` in ms. */
  receive({ group, reset, past = [], events = [], counters = [] }, time) {
    if (reset) {
      this.show(Infinity);
      this.tree.clear(group);
      this.log = this.log.filter((event) => event.group !== group);
      this.at = this.log.length;
      this.loading.set(group, []);
    }
    for (const [age, sequence, kind, data] of past)
      this.loading.get(group)?.push({ time: time - age, sequence, kind, group, id: data.id, data, isPast: true });
    for (const [sequence, kind, data] of events) {
      if (kind === "snapshot_end") this.#recall(group);
      else if (this.loading.has(group)) this.tree.put(group, data.id, data);
      else if (data) {
        this.changes += 1;
        this.log.push({ time, sequence, kind, group, id: data.id, data, after: data, before: null });
      }
    }
    if (this.isLive) {
      this.goTo(this.log.length);
      for (const data of counters) this.tree.count(group, data);
      this.#trim();
    }
  }

  /** Put the decisions from before a snapshot, which has arrived, into the log. */
  #recall(group) {
    const decisions = this.loading.get(group);
    this.loading.delete(group);
    if (!decisions?.length) return;
    this.show(Infinity);
    trace(decisions, this.tree);
    // Groups do not depend on each other.
    this.log = [...decisions, ...this.log].sort((one, other) => one.time - other.time);
    this.at = this.log.length;
  }

  /** Apply or undo events until `position` of them are applied. */
  goTo(position) {
    while (this.at < position) {
      const event = this.log[this.at++];
      event.before = this.tree.put(event.group, event.id, event.after);
    }
    while (this.at > position) {
      const event = this.log[--this.at];
      this.tree.put(event.group, event.id, event.before);
    }
  }

  /** Show the state after `position` events; the last position is the present. */
  show(position) {
    this.isLive = position >= this.log.length;
    this.goTo(Math.min(position, this.log.length));
  }

  /** Whether the state shown is from before a snapshot, so that only decisions of that time are known. */
  get isBefore() {
    return this.log[this.at]?.isPast ?? false;
  }

  /** The latest `number` events of `kinds` that are applied, latest first. */
  latest(kinds, number) {
    const found = [];
    for (let index = this.at - 1; index >= 0 && found.length < number; index--)
      if (kinds.has(this.log[index].kind)) found.push(this.log[index]);
    return found;
  }

  #trim() {
    if (this.log.length <= 2 * MAX_LOG) return;
    this.log = this.log.slice(-MAX_LOG);
    this.at = this.log.length;
  }
}
