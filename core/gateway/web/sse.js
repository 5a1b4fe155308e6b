// Server-sent events from the body of an answer (html.spec.whatwg.org, section 9.2): {data} or {comment}, as they come.

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield { data: data.join("\n") };
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
