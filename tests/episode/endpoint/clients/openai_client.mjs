import OpenAI from "openai";

const tool = {
  type: "function",
  function: {
    name: "add",
    description: "Add.",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
    parse: JSON.parse,
    function: ({ a, b }) => String(a + b),
  },
};
const runner = new OpenAI().chat.completions.runTools({
  model: "policy",
  messages: [{ role: "user", content: "Add 1 and 2, then 3 and 4." }],
  tools: [tool],
});
console.log(await runner.finalContent());
