#!/usr/bin/env python3
"""Computes the texts that Axolotl's data set types make of preference data, with which the tests of the workspace compare Phalanx.

    pip install transformers colorama addict pydantic fire && pip install --no-deps axolotl
    python3 tests/peers/preference_texts.py

Runs Axolotl's own functions on the rows below and writes tests/reference/preference/texts.json: a list with, for each combination of
`rl` and of a data set's keys, the job's `chat_template`, the rows, and for each row the columns `prompt`, `chosen` and `rejected`, or
`prompt`, `completion` and `label`. Where Axolotl fails, `error` has the kind of its exception instead. The reward model's type gives
ids of the tokenizer of tests/reference/models/tiny-llama3 instead: `chosen_ids` and `rejected_ids`.
"""

import argparse
import copy
import json
import logging
import os
import pathlib

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.disable(logging.CRITICAL)

import axolotl
import transformers
from axolotl.prompt_strategies.bradley_terry import load as load_reward
from axolotl.prompt_strategies.dpo import load as load_dpo
from axolotl.prompt_strategies.kto import load as load_kto
from axolotl.prompt_strategies.orpo import load as load_orpo
from axolotl.utils.dict import DictDefault

REFERENCE = pathlib.Path(__file__).resolve().parent.parent / "reference"
COLUMNS = {"prompt", "chosen", "rejected", "completion", "label", "chosen_ids", "rejected_ids"}
QUESTION, YES, NO, SYSTEM = "Why wait?\n", " Since all nine count.", "{No} reason 🌍", "Be short."


def turns(*contents, role="role", content="content", names=("user", "assistant")):
    return [{role: names[i % 2], content: text} for i, text in enumerate(contents)]


def with_systems(row):
    """The row without a system message, with one, and with an empty one."""
    return [row, {"system": SYSTEM, **row}, {"system": "", **row}]


PAIR = {"chosen": YES, "rejected": NO}
# Templates that trim an answer do not have it as it stands, where Axolotl looks for it.
TRIMMED = {"chosen": YES.strip(), "rejected": NO}
WHOLE = {"chosen": turns(QUESTION, YES.strip()), "rejected": turns(QUESTION, NO)}
LONG = {"chosen": turns("Hello.", "Good day.", QUESTION, YES.strip()), "rejected": turns("Hello.", "Good day.", QUESTION, NO)}
OTHER_KEYS = {"role": "from", "content": "value"}
OTHER_NAMES = {"user": ["human"], "assistant": ["gpt"], "system": ["system"]}

# (rl, keys of the data set, chat_template of the job, rows)
CASES = []
for home in ("chatml", "llama3"):
    CASES += [
        ("dpo", {"type": home}, None, [
            *with_systems({"prompt": QUESTION, **PAIR}), {"input": QUESTION, **PAIR}, {"question": QUESTION, **PAIR},
            {"instruction": QUESTION, "chosen_response": YES, "rejected_response": NO},
            {"instruction": "not this", "question": "nor this", "input": QUESTION, "chosen_response": "nor this", **PAIR}]),
        ("dpo", {"type": f"{home}.icr"}, None, with_systems({"input": QUESTION, **PAIR})),
        ("dpo", {"type": f"{home}.intel"}, None, with_systems({"question": QUESTION, **PAIR})),
        ("dpo", {"type": f"{home}.prompt_pairs"}, None, with_systems({"prompt": QUESTION, **PAIR})),
        ("dpo", {"type": f"{home}.ultra"}, None, with_systems({"prompt": QUESTION, **WHOLE})),
        ("dpo", {"type": f"{home}.argilla_chat"}, None, [WHOLE, {"system": SYSTEM, **WHOLE}, LONG]),
        ("dpo", {"type": f"{home}.argilla"}, None, [{"instruction": QUESTION, "chosen_response": YES, "rejected_response": NO}]),
        ("kto", {"type": f"{home}.argilla"}, None, with_systems({"instruction": QUESTION, "completion": YES, "label": True})),
        ("kto", {"type": f"{home}.intel"}, None, with_systems({"question": QUESTION, "completion": NO, "label": False})),
        ("kto", {"type": f"{home}.prompt_pairs"}, None, with_systems({"prompt": QUESTION, "completion": YES, "label": True})),
        ("kto", {"type": f"{home}.ultra"}, None, with_systems({"prompt": QUESTION, "completion": NO, "label": False})),
        ("kto", {"type": f"{home}.argilla_chat"}, None, [
            {"completion": WHOLE["chosen"], "label": True}, {"completion": LONG["rejected"], "label": False}]),
    ]
    CASES += [
        (rl, {"type": name}, home, rows) for rl, name, rows in (
            ("dpo", "chat_template.default", [
                {"messages": turns(QUESTION), "chosen": turns(YES.strip(), names=("assistant",))[0], "rejected": NO},
                {"messages": [{"role": "system", "content": SYSTEM}, *turns("Hello.", "Good day.", QUESTION)], **TRIMMED},
                {"messages": QUESTION, **WHOLE},
                {"messages": turns(QUESTION, names=("human",)), **TRIMMED}]),
            ("dpo", "chat_template.argilla_chat", [WHOLE, LONG]),
            ("orpo", "chat_template.argilla", [
                WHOLE, LONG, {"prompt": "Another question", **WHOLE}, {"system": SYSTEM, **LONG}]),
            ("reward", "bradley_terry.chat_template", [
                {"system": system, "input": QUESTION, **PAIR} for system in (SYSTEM, "")]),
        )
    ]
CASES += [
    ("dpo", {"type": "chat_template.default", "field_messages": "conversation", "field_chosen": "good", "field_rejected": "bad",
             "message_property_mappings": OTHER_KEYS, "roles": OTHER_NAMES}, "chatml", [
        {"conversation": [{"from": "system", "value": SYSTEM}, {"from": "human", "value": QUESTION}],
         "good": {"from": "gpt", "value": YES}, "bad": {"from": "gpt", "value": NO}}]),
    ("dpo", {"type": "zephyr.nectar"}, None, [
        {"prompt": QUESTION, "answers": [{"answer": f"rank {rank}", "rank": rank} for rank in (2, 1, 3)]}]),
    ("dpo", {"type": "passthrough"}, None, [{"prompt": QUESTION, **PAIR}]),
    ("dpo", {"type": {"prompt_format": "[{system}] {prompt} =>", "chosen_format": "{chosen}<|end|>"}}, None,
     with_systems({"prompt": QUESTION, **PAIR})),
    ("dpo", {"type": {"field_prompt": "q", "field_chosen": "a", "field_rejected": "b", "field_system": "s",
                      "prompt_format": "{{{prompt}}}", "rejected_format": "no: {rejected}"}}, None,
     [{"q": QUESTION, "a": YES, "b": NO, "s": SYSTEM}]),
    ("kto", {"type": {"field_prompt": "q", "field_completion": "a", "field_label": "good", "prompt_format": "{prompt} =>",
                      "completion_format": "{completion}<|end|>"}}, None, [{"q": QUESTION, "a": YES, "good": True}]),
    ("kto", {"type": {"prompt_format": "[{system}] {prompt}"}}, None,
     with_systems({"prompt": QUESTION, "completion": YES, "label": False})),
]


def transform(rl, keys, template, tokenizer):
    """Axolotl's function for a row, or None where it has none of that name."""
    job = DictDefault({"datasets": [copy.deepcopy(keys)], "chat_template": template, "sequence_len": 512, "rl": rl,
                       "reward_model": rl == "reward", "train_on_inputs": False})
    name = keys["type"] if isinstance(keys["type"], str) else "user_defined.default"
    if rl == "reward":
        strategy = load_reward(name.removeprefix("bradley_terry."), tokenizer, job, dict(keys))
        return strategy.tokenize_prompt
    loaded = {"dpo": load_dpo, "kto": load_kto, "orpo": load_orpo}[rl](name, job, dataset_idx=0)
    function = loaded[0] if isinstance(loaded, tuple) else loaded
    takes_tokenizer = name.startswith(("chat_template.", "passthrough"))
    return (lambda row: function(row, tokenizer=tokenizer)) if takes_tokenizer and function else function


def made(function, row):
    if function is None:
        return {"error": "no such type"}
    try:
        return {key: value for key, value in function(copy.deepcopy(row)).items() if key in COLUMNS}
    except Exception as failure:
        return {"error": type(failure).__name__}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=REFERENCE / "preference" / "texts.json")
    options = parser.parse_args()
    made_with = {"axolotl": axolotl.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{name} {version}" for name, version in made_with.items()))
    lines = []
    for rl, keys, template, rows in CASES:
        tokenizer = transformers.AutoTokenizer.from_pretrained(REFERENCE / "models" / "tiny-llama3")
        function = transform(rl, keys, template, tokenizer)
        case = {"rl": rl, "dataset": keys, "chat_template": template, "rows": rows, "made": [made(function, row) for row in rows]}
        print(rl, keys["type"], template or "", *(out["error"] for out in case["made"] if "error" in out))
        lines.append(json.dumps(case, ensure_ascii=False))
    body = ",\n  ".join(lines)
    options.out.write_text(f'{{\n "made_with": {json.dumps(made_with)},\n "cases": [\n  {body}]}}\n')


if __name__ == "__main__":
    main()
