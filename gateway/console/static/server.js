// Requests to the gateway: the credential, errors, and streams of server-sent events.

const KEY = "pando.key";

// Kept for this tab only. Without one, the gateway decides by the connection.
export const credential = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch `path`; throws a ServerError with the gateway's message unless the answer is a success. */
export async function request(path, { body, signal, method } = {}) {
  const headers = {};
  if (credential.get()) headers.authorization = `Bearer ${credential.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The gateway does not answer.");
  }
  if (!response.ok) throw new ServerError(response.status, await messageOf(response));
  return response;
}

export const getJson = async (path, options) => (await request(path, options)).json();

async function messageOf(response) {
  try {
    const { error } = await response.json();
    return error?.message ?? `Status ${response.status}`;
  } catch {
    return `Status ${response.status}`;
  }
}

/** Yield the data of each server-sent event of a response, as text. EventSource cannot send a credential. */
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
