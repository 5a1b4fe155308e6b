// Files of text that go along with a message.

const MOST_BYTES = 1_000_000;

export async function readFiles(files) {
  const read = [];
  for (const file of files) {
    if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than a megabyte.`);
    read.push({ name: file.name, text: textOf(file.name, await file.arrayBuffer()) });
  }
  return read;
}

export function textOf(name, buffer) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
  } catch {
    throw new Error(`${name} is no text in UTF-8: only text is read here.`);
  }
  if (text.includes("\0")) throw new Error(`${name} is no text: only text is read here.`);
  return text;
}
