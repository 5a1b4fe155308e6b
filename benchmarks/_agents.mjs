// Programs of npm that call a function: one, by name, from a folder where they are installed. Each asks for a call, runs
// it, gets an answer of its result, and where it keeps the conversation asks once more.
// OPENAI_BASE_URL and OPENAI_API_KEY are read by the packages themselves, or given to them.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [program, folder, model, request] = process.argv.slice(2);
const required = createRequire(`${folder}/`);
const load = (name) => import(pathToFileURL(required.resolve(name)));
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
let calls = 0;
const capitalOf = ({ country }) => {
  assert.equal(country, "France");
  calls += 1;
  return "Paris";
};
const DESCRIPTION = "Tells the capital of a country.";

async function aiSdk(languageModel) {
  const { generateText, stepCountIs, streamText, tool } = await load("ai");
  const { z } = await load("zod");
  const tools = {
    capital_of: tool({
      description: DESCRIPTION,
      inputSchema: z.object({ country: z.string() }),
      execute: async (input) => capitalOf(input),
    }),
  };
  const asked = { model: languageModel, tools, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
  const messages = [{ role: "user", content: request }];
  const first = await generateText({ ...asked, messages, stopWhen: stepCountIs(3) });
  assert.equal(calls, 1);
  messages.push(...first.response.messages, { role: "user", content: "Say it again." });
  const second = streamText({ ...asked, messages, toolChoice: "none" });
  let text = "";
  for await (const part of second.textStream) text += part;
  assert.ok(text.length > 0, "the second turn said nothing");
  return first.text;
}

const programs = {
  async "ai-sdk openai"() {
    const { createOpenAI } = await load("@ai-sdk/openai");
    return aiSdk(createOpenAI({ baseURL, apiKey })(model));
  },

  async "ai-sdk openai-compatible"() {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return aiSdk(createOpenAICompatible({ name: "core", baseURL, apiKey })(model));
  },

  async "langchain"() {
    const { ChatOpenAI } = await load("@langchain/openai");
    const { tool } = await load("@langchain/core/tools");
    const { z } = await load("zod");
    const schema = z.object({ country: z.string() });
    const capital = tool(async (input) => capitalOf(input), { name: "capital_of", description: DESCRIPTION, schema });
    const options = { model, temperature: 0, maxTokens: 60, maxRetries: 0, configuration: { baseURL }, apiKey };
    const chat = new ChatOpenAI(options).bindTools([capital]);
    const messages = [{ role: "user", content: request }];
    const called = await chat.invoke(messages);
    const result = await capital.invoke(called.tool_calls[0]);
    const said = await chat.invoke([...messages, called, result]);
    assert.equal(calls, 1);
    return said.content;
  },
};

console.log(await programs[program]());
