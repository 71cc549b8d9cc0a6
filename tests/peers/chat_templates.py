#!/usr/bin/env python3
"""Compares the text of conversations with that of transformers.

    cargo build --release -p phalanx-tests --bin chat_texts
    python3 tests/peers/chat_templates.py target/release/chat_texts runtime/src/data/templates/*.jinja

Renders 200 generated conversations with each template: with and without a system turn, with reasoning, calls of tools, their answers,
letters beyond ASCII, blanks around texts. Text and generation prompt must be equal; where transformers refuses, we must too.
Where the template has `generation` blocks, so must the trained parts. Needs transformers.
"""

import json
import random
import subprocess
import sys

from transformers.utils.chat_template_utils import render_jinja_template

BOS, EOS = "<s>", "</s>"
CONVERSATIONS = 200
TEXTS = ["Hi", "  padded ", "two\nlines\n", "Grüße, 世界 🌍", 'a "quoted" <tag> & more', "{{ braces }} and 'single'", "1 + 1 = 2?"]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Name, as in Köln"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "time", "description": "<now>", "parameters": {"type": "object", "properties": {}}}},
]


def conversation(rng):
    """Turns of the usual order, each with the fields that it may have."""
    text = lambda: rng.choice(TEXTS)
    messages = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    with_tools = rng.random() < 0.4
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        if with_tools and rng.random() < 0.5:
            call = {"name": "weather", "arguments": {"city": text(), "days": rng.randint(1, 9), "exact": rng.random() < 0.5}}
            content = None if rng.random() < 0.5 else text()
            calls = [{"type": "function", "id": "abcdefgh1", "function": call}]
            messages.append({"role": "assistant", "content": content or "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": text()})
        answer = {"role": "assistant", "content": text()}
        if rng.random() < 0.3:
            answer["reasoning_content"] = text()
        elif rng.random() < 0.2:
            answer["content"] = f"<think>\n{text()}\n</think>\n\n{text()}"
        messages.append(answer)
    return messages, TOOLS if with_tools else None


def theirs(template, messages, tools):
    """Text, generation prompt and texts of generation blocks, or None where the template refuses."""
    values = {"bos_token": BOS, "eos_token": EOS, "tools": tools, "chat_template": template}
    try:
        with_blocks = "{% generation" in template or "{%- generation" in template
        texts, blocks = render_jinja_template([messages], return_assistant_tokens_mask=with_blocks, **values)
        prompts, _ = render_jinja_template([messages], add_generation_prompt=True, **values)
    except Exception:  # Whatever a template or Jinja raises is a refusal.
        return None
    trained = [texts[0][start:end] for start, end in blocks[0]] if with_blocks else None
    return {"text": texts[0], "prompt": prompts[0], "trained": trained}


def main():
    binary, paths = sys.argv[1], sys.argv[2:]
    failed = False
    for path in paths:
        template = open(path, encoding="utf-8").read()
        rng = random.Random(path.rsplit("/", 1)[-1])
        cases = [conversation(rng) for _ in range(CONVERSATIONS)]
        lines = [json.dumps({"template": template, "bos": BOS, "eos": EOS, "messages": m, "tools": t}) for m, t in cases]
        answer = subprocess.run([binary], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
        counts = {"equal": 0, "refused by both": 0, "different": 0, "masked": 0, "not masked": 0}
        for (messages, tools), line in zip(cases, answer.splitlines(), strict=True):
            ours, expected = json.loads(line), theirs(template, messages, tools)
            if expected is None or "error" in ours:
                outcome = "refused by both" if expected is None and "error" in ours else "different"
            else:
                same = ours["text"] == expected["text"] and ours["prompt"] == expected["prompt"]
                same = same and expected["trained"] in (None, ours["trained"])
                outcome = "equal" if same else "different"
                is_masked = isinstance(ours["trained"], list)
                counts["masked" if is_masked else "not masked"] += 1
            counts[outcome] += 1
            if outcome == "different" and counts["different"] == 1:
                print(json.dumps({"template": path, "messages": messages, "ours": ours, "theirs": expected}, indent=1, ensure_ascii=False))
        failed |= counts["different"] > 0
        print(path.rsplit("/", 1)[-1], ", ".join(f"{count} {what}" for what, count in counts.items() if count))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
