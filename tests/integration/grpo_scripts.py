"""Five scripts as they are published for GRPO trainers: their rows and reward functions, without the trainer.

Written anew after the quick start of TRL's documentation, the demonstration of several rewards on GSM8K, Mini-R1's
countdown, open-r1's accuracy and format rewards, and verl's scoring of GSM8K. A run stores this file alone.
"""

import re

SYSTEM_PROMPT = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"


# ---- 1: one function, prompts are texts -------------------------------------------------------------------------


def num_unique_chars(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


# ---- 2: several functions, prompts are messages ------------------------------------------------------------------


def extract_xml_answer(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def correctness_reward_func(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    assert prompts[0][-1]["role"] == "user"
    return [2.0 if extract_xml_answer(r) == a else 0.0 for r, a in zip(responses, answer, strict=True)]


def int_reward_func(completions, **kwargs):
    return [0.5 if extract_xml_answer(completion[0]["content"]).isdigit() else 0.0 for completion in completions]


def strict_format_reward_func(completions, **kwargs):
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return [0.5 if re.match(pattern, completion[0]["content"]) else 0.0 for completion in completions]


def xmlcount_reward_func(completions, **kwargs):
    return [completion[0]["content"].count("<") * 0.125 for completion in completions]


# ---- 3: columns by name, an expression that is checked -----------------------------------------------------------


def format_reward_func(completions, target, **kwargs):
    rewards = []
    for completion, _ in zip(completions, target, strict=True):
        match = re.search(r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)<\/think>\n<answer>", "<think>" + completion)
        rewards.append(1.0 if match else 0.0)
    return rewards


def equation_reward_func(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums, strict=True):
        match = re.search(r"<answer>(.*?)<\/answer>", completion)
        equation = match.group(1).strip() if match else ""
        used = [int(number) for number in re.findall(r"\d+", equation)]
        rewards.append(1.0 if sorted(used) == sorted(numbers) and int(goal) else 0.0)
    return rewards


# ---- 4: a library that verifies, None for what it cannot parse ---------------------------------------------------


def accuracy_reward(completions, solution, **kwargs):
    from math_verify import parse, verify

    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    for content, sol in zip(contents, solution, strict=True):
        gold = parse(sol)
        rewards.append(float(verify(gold, parse(content))) if gold else None)
    return rewards


def tag_count_reward(completions, **kwargs):
    return [0.25 * completion[0]["content"].count("think") for completion in completions]


# ---- 5: verl ------------------------------------------------------------------------------------------------------


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    solution = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    assert data_source == "openai/gsm8k"
    assert extra_info["split"] == "train"
    return 1.0 if solution and solution[-1] == ground_truth else 0.1 * len(set(solution_str)) / 12


def chat(question):
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


SCRIPTS = {
    "trl": (num_unique_chars, lambda at: {"prompt": f"SUBREDDIT: r/relationships\n\nPOST {at}\n\nTL;DR:"}),
    "gsm8k": (
        [xmlcount_reward_func, strict_format_reward_func, int_reward_func, correctness_reward_func],
        lambda at: {"prompt": chat(f"{at} + 1?"), "answer": str(at + 1)},
    ),
    "countdown": (
        [format_reward_func, equation_reward_func],
        lambda at: {"prompt": f"Use {[at, 3]} to make {at + 3}.", "target": str(at + 3), "nums": [at, 3]},
    ),
    "open-r1": (
        [accuracy_reward, tag_count_reward],
        lambda at: {"prompt": chat(f"What is {at}^2?"), "solution": f"${at * at}$"},
    ),
    "verl": (
        compute_score,
        lambda at: {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f'{at}? Let\'s think step by step and output "####".'}],
            "reward_model": {"style": "rule", "ground_truth": str(at)},
            "extra_info": {"split": "train", "index": at},
        },
    ),
}
