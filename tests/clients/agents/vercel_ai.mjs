// Vercel's `ai` with `@ai-sdk/openai` in its default, the Responses API: two user turns, the first with tool calls.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [environment, baseURL, apiKey] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${environment}/node_modules/`));
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, isStepCount, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const model = createOpenAI({ baseURL, apiKey })("default");
const tools = {
  lookup: tool({
    description: "Look it up.",
    inputSchema: z.object({ q: z.string() }),
    execute: async () => "2",
  }),
};
const messages = [{ role: "user", content: "What is it?" }];
const stopWhen = isStepCount(5);
for (const next of ["ok", null]) {
  const result = await generateText({ model, tools, messages, stopWhen, maxRetries: 0 });
  console.log(result.text);
  messages.push(...result.responseMessages);
  if (next !== null) messages.push({ role: "user", content: next });
}
