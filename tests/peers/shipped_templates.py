#!/usr/bin/env python3
"""Compares text and trained parts of conversations with transformers, over the chat templates that other projects ship.

    cargo build --release -p phalanx-tests --bin chat_texts
    python3 tests/peers/shipped_templates.py target/release/chat_texts DIR...

Takes every `*.jinja` in the folders that reads messages, such as those in clones of TRL, Axolotl and chujiezheng/chat_templates, and
renders the conversations below with each. Text and generation prompt must be those of transformers. Where the answers are is found without
us: transformers renders the same conversation with a mark at both ends of every text of a message. All of an answer must be trained on;
nothing of other messages, no opening of a turn, and, where the template prints something after an answer, its end. A template that prints
contents only as lists of parts gets such lists on both sides, and again with texts on our side, which must give the same text and mask.
Prints the numbers, and refusals by reason. Needs transformers.
"""

import argparse
import collections
import datetime
import glob
import json
import os
import re
import subprocess
import sys

from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

BOS, EOS = "<s>", "</s>"
FIRST, LAST = 0xE000, 0xE100  # Marks in front of and behind message N: private use, and no blank.
HEADER_FIELDS = {"role", "name", "id", "tool_call_id"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of Köln.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Name"}, "items": {"type": "array", "items": {"type": "string"}}},
    "required": ["city"]}}}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(**arguments):
    return [{"type": "function", "id": "abcdefgh1", "function": {"name": "weather", "arguments": arguments}}]


ASK, USED = turn("user", "Weather?"), turn("tool", "12 °C", tool_call_id="abcdefgh1", name="weather")
CONVERSATIONS = {
    "plain": ([turn("user", "Hi"), turn("assistant", "Hello.")], None),
    "system": ([turn("system", "Be kind."), turn("user", "Hi"), turn("assistant", "Hello.")], None),
    "turns": ([turn("user", "Hi"), turn("assistant", "Hello."), turn("user", "So?"), turn("assistant", "Bye.\n")], None),
    "one letter": ([turn("user", "A"), turn("assistant", "A"), turn("user", "e"), turn("assistant", "s")], None),
    "role names": ([turn("user", "user"), turn("assistant", "assistant"), turn("user", "model"), turn("assistant", "user")], None),
    "tags": ([turn("user", "<b>"), turn("assistant", "<answer>4</answer>"), turn("user", "["), turn("assistant", "<|x|>")], None),
    "unicode": ([turn("user", "Grüße 世界"), turn("assistant", "🌍 é\u0301 ﷽ \u200b."), turn("user", "ß"), turn("assistant", "ẞ")], None),
    "empty": ([turn("user", "Hi"), turn("assistant", ""), turn("user", "So?"), turn("assistant", "Bye.")], None),
    "blanks": ([turn("user", "  Hi \n"), turn("assistant", "\n  two\n\nlines \n"), turn("user", "So?"), turn("assistant", " x ")], None),
    "repeated": ([turn("user", "Hello."), turn("assistant", "Hello."), turn("user", "Hello."), turn("assistant", "Hello.")], None),
    "thought": ([turn("user", "Hi"), turn("assistant", "Hello.", reasoning_content="Greet."), turn("user", "So?"),
                 turn("assistant", "Bye.", reasoning_content="Part.")], None),
    "thought in content": ([turn("user", "Hi"), turn("assistant", "<think>\nGreet.\n</think>\n\nHello."), turn("user", "So?"),
                            turn("assistant", "<think>\nPart.\n</think>\n\nBye.")], None),
    "tools unused": ([turn("user", "Hi"), turn("assistant", "Hello.")], [TOOL]),
    "call": ([ASK, turn("assistant", "", tool_calls=call(city="Köln", days=2)), USED, turn("assistant", "Cool.")], [TOOL]),
    "call, content null": ([ASK, turn("assistant", None, tool_calls=call(city="Köln")), USED, turn("assistant", "Cool.")], [TOOL]),
    "call with text": ([ASK, turn("assistant", "Let me see.", tool_calls=call(city="a \"b\" <c>", exact=True, list=[1, None])), USED,
                        turn("assistant", "Cool.")], [TOOL]),
    "thought and call": ([turn("system", "Be kind."), ASK, turn("assistant", "", reasoning_content="Look.", tool_calls=call(city="Köln")), USED,
                          turn("assistant", "Cool.", reasoning_content="Done.")], [TOOL]),
}


def rendered(template, messages, tools, prompt):
    values = {"bos_token": BOS, "eos_token": EOS, "tools": tools, "chat_template": template, "add_generation_prompt": prompt}
    return render_jinja_template([_normalize_chat_messages(messages)], **values)[0][0]


def in_parts(messages):
    """The same with a list of one part instead of each text."""
    part = lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{**message, "content": part(message["content"])} for message in messages]


def expects_parts(template):
    """Whether the template prints the texts of a conversation only in lists of parts."""
    conversation = [turn("user", "question"), turn("assistant", "answer")]

    def prints(messages):
        try:
            text = rendered(template, messages, None, False)
        except Exception:
            return False
        return all(message["content"] in text for message in conversation)

    return not prints(conversation) and prints(in_parts(conversation))


class Today(datetime.datetime):
    """The day that Phalanx prints as today's, so that tokens do not depend on the day of a run."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def blocks_of(template, messages, tools):
    """The ranges of `generation` blocks, or None if the template has none."""
    if not re.search(r"\{%-?\s*generation", template):
        return None
    values = {"bos_token": BOS, "eos_token": EOS, "tools": tools, "chat_template": template, "return_assistant_tokens_mask": True}
    return render_jinja_template([_normalize_chat_messages(messages)], **values)[1][0]


def marked(value, idx, by_words):
    """The same with a mark at both ends of every text, within the blanks around it, or of every word outside of tags."""
    if isinstance(value, str) and by_words:
        return re.sub(r"(<[^<>]*>)|([^\s<>]+)", lambda m: m[1] or chr(FIRST + idx) + m[2] + chr(LAST + idx), value)
    if isinstance(value, str) and value.strip():
        start, end = len(value) - len(value.lstrip()), len(value.rstrip())
        return value[:start] + chr(FIRST + idx) + value[start:end] + chr(LAST + idx) + value[end:]
    if isinstance(value, list):
        return [marked(item, idx, by_words) for item in value]
    if isinstance(value, dict):
        return {key: item if key in HEADER_FIELDS or key == "type" else marked(item, idx, by_words) for key, item in value.items()}
    return value


def told(template, messages, tools, text, by_words=False):
    """The ranges of the text that come from each message, or None if the marks change it."""
    try:
        found = rendered(template, [marked(message, idx, by_words) for idx, message in enumerate(messages)], tools, False)
    except Exception:
        return None
    marks = collections.Counter(c for c in found if FIRST <= ord(c) < LAST + 0x100)
    halves = [n for n in range(len(messages)) if marks[chr(FIRST + n)] != marks[chr(LAST + n)]]
    if halves and not by_words:  # The template splits a text.
        return told(template, messages, tools, text, True)
    plain, ranges, open_at = [], collections.defaultdict(list), {}
    for c in found:
        code = ord(c)
        if FIRST <= code < FIRST + 0x100:
            open_at[code - FIRST] = len(plain)
        elif LAST <= code < LAST + 0x100:
            if code - LAST in open_at:
                ranges[code - LAST].append((open_at.pop(code - LAST), len(plain)))
        else:
            plain.append(c)
    return ranges if "".join(plain) == text else None


def mask_fault(messages, ranges, text, spans):
    """What is wrong with the trained ranges, or None."""
    for idx, message in enumerate(messages):
        for start, end in ranges[idx]:
            inside = sum(min(end, b) - max(start, a) for a, b in spans if a < end and start < b)
            if message["role"] == "assistant" and inside < end - start:
                return f"{text[start:end]!r} of an answer is not trained on"
            if message["role"] != "assistant" and inside:
                return f"{text[start:end]!r} of the {message['role']} is trained on"
    of_answers = [span for idx, message in enumerate(messages) if message["role"] == "assistant" for span in ranges[idx]]
    for a, b in spans:
        own = [(start, end) for start, end in of_answers if start < b and a < end]
        if not own:
            return f"{text[a:b]!r} is trained on, which is no answer"
        before, after = text[a:min(own)[0]], text[max(own)[1]:b]
        for letters in (before, after):
            if re.search(r"assistant|model|bot\b|user|human|system|tool\b|INST|CHATBOT|Observation", letters) and not re.search(r"tool|call|to=", letters):
                return f"the opening {letters!r} is trained on"
        follows = text[b:].lstrip()
        if not after.strip() and re.match(r"<\|?/?(im_end|end|eot|eos|s\b|return)|<turn\|>|</s>|\[/?e", follows):
            return f"the end {follows[:20]!r} is not trained on"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--show", type=int, default=20, help="differences to print")
    args = parser.parse_args()
    chat_template_utils.datetime = Today
    paths = sorted(path for folder in args.folders for path in glob.glob(os.path.join(folder, "**", "*.jinja"), recursive=True))
    cases, counts, refusals = [], collections.Counter(), collections.Counter()
    n_templates, n_of_parts = 0, 0
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            template = file.read()
        if "messages" not in template:  # Such as a Dockerfile.
            continue
        n_templates += 1
        is_of_parts = expects_parts(template)
        n_of_parts += is_of_parts
        for name, (messages, tools) in CONVERSATIONS.items():
            theirs = in_parts(messages) if is_of_parts else messages
            cases.append((path, template, name, theirs, theirs, tools))
            if is_of_parts:
                cases.append((path, template, f"{name}, as texts", theirs, messages, tools))
    lines = [json.dumps({"template": template, "bos": BOS, "eos": EOS, "messages": ours, "tools": tools})
             for _, template, _, _, ours, tools in cases]
    answer = subprocess.run([args.binary], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    for (path, template, name, messages, _, tools), line in zip(cases, answer.splitlines(), strict=True):
        ours = json.loads(line)
        try:
            text, prompt = (rendered(template, messages, tools, flag) for flag in (False, True))
        except Exception as error:  # Whatever a template or Jinja raises is a refusal.
            text, reason = None, str(error)
        fault = None
        if text is None and "error" in ours:
            counts["refused by both"] += 1
            refusals[f"both: {reason[:90]}"] += 1
        elif text is None:
            counts["only transformers refuses"] += 1
            refusals[f"only transformers: {reason[:90]}"] += 1
        elif "error" in ours:
            counts["only Phalanx refuses"] += 1
            fault = ours["error"]
        elif (ours["text"], ours["prompt"]) != (text, prompt):
            counts["text differs"] += 1
            fault = [text, ours["text"], prompt, ours["prompt"]]
        else:
            counts["text equal"] += 1
            ranges = told(template, messages, tools, text)
            # Byte offsets of ours as offsets of letters.
            at = lambda byte: len(text.encode()[:byte].decode())
            spans = [(at(a), at(b)) for a, b in ours["spans"]]
            blocks = blocks_of(template, messages, tools)
            if ranges is not None and blocks:
                # An empty answer is not trained on, whether the template has a block for it or not.
                answers = [span for idx, message in enumerate(messages) if message["role"] == "assistant" for span in ranges[idx]]
                wanted = [(a, b) for a, b in blocks if any(start < b and a < end for start, end in answers)]
                fault = f"blocks are {[text[a:b] for a, b in wanted]}" if wanted != spans else None
                counts["mask differs from blocks" if fault else "mask equal to blocks"] += 1
                fault = fault and [fault, text, [text[a:b] for a, b in spans]]
            elif ranges is None:
                counts["mask not checked: marks change the text"] += 1
            else:
                fault = mask_fault(messages, ranges, text, spans)
                counts["mask differs" if fault else "mask equal"] += 1
                fault = fault and [fault, text, [text[a:b] for a, b in spans]]
        if fault and args.show > 0:
            args.show -= 1
            print(os.path.relpath(path), "|", name, "|", json.dumps(fault, ensure_ascii=False)[:900])
    print(f"{n_templates} templates x {len(CONVERSATIONS)} conversations, {n_of_parts} of the templates with parts and with texts:",
          ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    for reason, count in refusals.most_common():
        print(f"  {count} refused by {reason}")
    sys.exit(1 if any(counts[what] for what in ("only Phalanx refuses", "text differs", "mask differs", "mask differs from blocks")) else 0)


if __name__ == "__main__":
    main()
