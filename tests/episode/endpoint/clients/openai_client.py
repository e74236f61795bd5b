import json

from openai import OpenAI

client = OpenAI()
tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
messages = [{"role": "user", "content": "Add 1 and 2, then 3 and 4."}]
while True:
    completion = client.chat.completions.create(model="policy", messages=messages, tools=[tool])
    message = completion.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        numbers = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
    if not message.tool_calls:
        break
print(message.content)
