// Conversations in the browser's own database: they stay on this machine, and other tabs hear of what changes.

import { merged } from "./tree.js";

const NAME = "core";
const STORE = "conversations";
const channel = new BroadcastChannel("core conversations");

let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function within(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    let result;
    work(transaction.objectStore(STORE), (value) => (result = value));
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export function readAll() {
  return within("readonly", (store, give) => {
    store.getAll().onsuccess = (event) => give(event.target.result);
  });
}

export async function save(conversation) {
  await within("readwrite", (store) => {
    store.get(conversation.id).onsuccess = (event) => store.put(merged(event.target.result, conversation));
  });
  channel.postMessage({ saved: conversation });
}

export async function remove(id) {
  await within("readwrite", (store) => store.delete(id));
  channel.postMessage({ removed: id });
}

// `onSaved` and `onRemoved` are called for what other tabs do.
export function hear({ onSaved, onRemoved }) {
  channel.onmessage = ({ data }) => (data.saved ? onSaved(data.saved) : onRemoved(data.removed));
}
