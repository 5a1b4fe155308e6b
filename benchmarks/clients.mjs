// The official openai package of the folder given: one check, by name. It fails where an answer isn't as it should be.
// OPENAI_BASE_URL and OPENAI_API_KEY are read by the package itself.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [check, folder, model, question, schema] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: question }];
const asked = { model, messages, temperature: 0, max_tokens: 40 };

const checks = {
  async chat() {
    const answer = await client.chat.completions.create(asked);
    assert.ok(answer.usage.completion_tokens > 0);
    return answer.choices[0].message.content;
  },

  async stream() {
    const whole = await client.chat.completions.create(asked);
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    const texts = [];
    let usage;
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta.content) texts.push(chunk.choices[0].delta.content);
      usage = chunk.usage ?? usage;
    }
    assert.ok(texts.length > 1, "it came in one piece");
    assert.equal(texts.join(""), whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
    return texts.join("");
  },

  async json_schema() {
    const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: JSON.parse(schema) } };
    const answer = await client.chat.completions.parse({ ...asked, response_format: format, max_tokens: 100 });
    const parsed = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(parsed), JSON.parse(schema).required);
    return JSON.stringify(parsed);
  },

  async responses() {
    const request = { model, input: question, temperature: 0, max_output_tokens: 40, store: false };
    const whole = await client.responses.create(request);
    let text = "";
    for await (const event of await client.responses.create({ ...request, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    return text;
  },

  async refusal() {
    const wrong = client.chat.completions.create({ ...asked, model: "no-such-model" });
    await assert.rejects(wrong, OpenAI.NotFoundError);
    return "another model is a NotFoundError";
  },
};

console.log(await checks[check]());
