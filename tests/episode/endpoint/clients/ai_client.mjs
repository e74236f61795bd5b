import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const add = tool({
  description: "Add.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const { text } = await generateText({
  model: openai("policy"),
  prompt: "Add 1 and 2, then 3 and 4.",
  tools: { add },
  stopWhen: stepCountIs(5),
});
console.log(text);
