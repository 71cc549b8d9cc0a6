#!/usr/bin/env python3
"""Compares the text of conversations with that of transformers.

    cargo build --release -p phalanx-tests --bin chat_texts
    python3 tests/peers/chat_templates.py target/release/chat_texts runtime/src/data/templates/*.jinja [--against DIR]

Renders 200 generated conversations with each template: with and without a system turn, with reasoning, calls of tools, their answers,
letters beyond ASCII, blanks around texts. Text and generation prompt must be equal; where transformers refuses, we must too.
Where the template has `generation` blocks, so must the trained parts. Needs transformers.

With --golden, writes the texts that a test of the workspace compares with.

With --against, transformers renders the template of the same name in DIR instead: the folder `axolotl/utils/chat_templates/templates` of
an installation of Axolotl, or a folder with the templates of the models. Conversations are then limited to what both render: the sets below
say what our templates leave out on purpose.
"""

import argparse
import json
import os
import random
import subprocess
import sys

from transformers.utils.chat_template_utils import render_jinja_template

BOS, EOS = "<s>", "</s>"
CONVERSATIONS = 200
# Templates that have no form for calls of tools; a conversation with tools is refused with them.
WITHOUT_TOOLS = {"alpaca", "cohere", "aya", "deepseek_v2", "exaone", "exaone4", "falcon_h1", "gemma", "gemma3", "gemma3n", "gemma4",
                 "gemma4_unified", "llama3",
                 "llama4", "metharme", "mistral_v1", "mistral_v7_tekken", "nemotron_h", "phi_3", "phi_35", "phi_4"}
# Peers put a text of their own there if a conversation has no system message; ours is empty.
WITH_SYSTEM = {"metharme", "mistral_v7_tekken", "phi_4"}
# Axolotl's templates open a thought in the prompt; the models' own do not.
OTHER_PROMPT = {"qwen3", "qwen3_5"}
# Names of the same format.
ALSO = {"cohere": ["aya"], "gemma3": ["gemma3n"], "gemma4": ["gemma4_unified"], "qwen3": ["qwen3_5"]}
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
    for turn in range(rng.randint(1, 4)):
        # No two questions are equal: the templates of Mistral look for the last one by its text.
        messages.append({"role": "user", "content": f"{turn}. {text()}" if turn else text()})
        if with_tools and rng.random() < 0.5:
            ids = ["abcdefgh1", "abcdefgh2"][: rng.randint(1, 2)]
            arguments = lambda: {"city": text(), "days": rng.randint(1, 9), "exact": rng.random() < 0.5}
            content = None if rng.random() < 0.5 else text()
            calls = [{"type": "function", "id": id, "function": {"name": "weather", "arguments": arguments()}} for id in ids]
            messages.append({"role": "assistant", "content": content or "", "tool_calls": calls})
            messages.extend({"role": "tool", "tool_call_id": id, "name": "weather", "content": text()} for id in ids)
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


def limited(name, messages, tools):
    """The part of a conversation that a template has a form for."""
    if name in WITHOUT_TOOLS:
        tools = None
        messages = [m for m in messages if m["role"] != "tool" and "tool_calls" not in m]
    if name in WITH_SYSTEM and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "Be kind."}] + messages
    return messages, tools


def with_texts_of_arguments(messages):
    """The same, with the arguments of calls as texts, which some templates expect."""
    messages = json.loads(json.dumps(messages))
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def pairs(paths, against):
    """Our templates, each with that of transformers, and a name."""
    for path in paths:
        ours = open(path, encoding="utf-8").read()
        name = os.path.basename(path).removesuffix(".jinja")
        if against is None:
            yield name, ours, ours
            continue
        for other in [name, *ALSO.get(name, [])]:
            file = os.path.join(against, other + ".jinja")
            if os.path.exists(file):
                yield other, ours, open(file, encoding="utf-8").read()
            else:
                print(f"{other}: not in {against}")


def golden(paths, against):
    """Texts that transformers makes with the peers' templates, for `runtime/src/data/templates/texts.json`."""
    talk = [{"role": "user", "content": " Hi? "}, {"role": "assistant", "content": "Grüße!\n"},
            {"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]
    call = {"type": "function", "id": "abcdefgh1", "function": {"name": "time", "arguments": {"zone": "Köln"}}}
    used = [talk[0], {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefgh1", "name": "time", "content": "12:00"}, talk[3]]
    texts = {}
    for name, _, template in pairs(paths, against):
        cases = [([{"role": "system", "content": "Be kind."}] + talk, None), (talk, None), (used, TOOLS[1:])]
        cases = [case for case in cases if limited(name, *case) == case]
        made = []
        for messages, tools in cases:
            text = theirs(template, messages, tools) or theirs(template, with_texts_of_arguments(messages), tools)
            text = text or {"text": None, "prompt": None}
            made.append({"messages": messages, "tools": tools, "text": text["text"], "prompt": text["prompt"]})
            if name in OTHER_PROMPT:
                del made[-1]["prompt"]
        texts[name] = made
    return texts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("templates", nargs="+")
    parser.add_argument("--against")
    parser.add_argument("--golden", help="write texts of the peers to this file instead")
    args = parser.parse_args()
    if args.golden:
        texts = golden(args.templates, args.against)
        with open(args.golden, "w", encoding="utf-8") as file:
            json.dump(texts, file, indent=1, ensure_ascii=False)
            file.write("\n")
        return
    binary, failed = args.binary, False
    for path, template, their_template in pairs(args.templates, args.against):
        rng = random.Random(path)
        cases = [conversation(rng) for _ in range(CONVERSATIONS)]
        if args.against is not None:
            cases = [limited(path, *case) for case in cases]
        lines = [json.dumps({"template": template, "bos": BOS, "eos": EOS, "messages": m, "tools": t}) for m, t in cases]
        answer = subprocess.run([binary], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
        counts = {"equal": 0, "refused by both": 0, "different": 0, "masked": 0, "not masked": 0}
        for (messages, tools), line in zip(cases, answer.splitlines(), strict=True):
            ours, expected = json.loads(line), theirs(their_template, messages, tools)
            if expected is None and "error" not in ours:
                expected = theirs(their_template, with_texts_of_arguments(messages), tools)
            if args.against is not None and path in OTHER_PROMPT and expected is not None:
                expected["prompt"] = ours.get("prompt")
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
        print(path + ":", ", ".join(f"{count} {what}" for what, count in counts.items() if count))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
