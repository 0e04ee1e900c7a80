// Numbers and names as text.

const COUNT = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => COUNT.format(Number(value ?? 0));
export const short = (value) => SHORT.format(Number(value ?? 0));
export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–");
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${Number(number) === 1 ? one : many}`;

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

/** A time in ms as that of a clock, with the date unless it is today's. */
export function moment(time) {
  const at = new Date(time);
  return at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
}

/** The name of a node's owner: names where the scheduler discloses them, otherwise its pseudonym. */
export function ownerName(owner = {}) {
  if (owner.subject) return `${owner.tenant}/${owner.subject}${owner.salt ? ` (${owner.salt})` : ""}`;
  return owner.tenant ?? (owner.fingerprint ? `#${owner.fingerprint.slice(0, 8)}` : "");
}

/** The last two parts of a socket's path; other addresses as they are. */
export const shortName = (address) => (address.startsWith("unix:") ? address.split("/").slice(-2).join("/") : address);

// gRPC's words around the cause, with the address that is shown already.
const CONNECTING = /failed to connect to all addresses; last error: (?:[A-Z_]+: )?\S+: (?:connect: )?/;

/** A service's error without what the page shows beside it. */
export const causeOf = (text) => text.replace(CONNECTING, "");
