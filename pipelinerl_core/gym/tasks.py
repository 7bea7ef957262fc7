"""How every task of reasoning-gym 0.1.25 is scored: by comparing the answer, or by evaluating the answer as code.

The table is a manual review of `score_answer` of every task. Tasks outside of the table are refused.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Literal

from pipelinerl_core.config.prompts import ReasoningGymPrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError

Gate = Literal["none", "short", "moves", "fraction", "number", "list", "arithmetic", "formula"]
"""What an answer must be before the library's scorer sees it; see rewards/gate.py."""

EVALUATING: frozenset[Gate] = frozenset({"list", "arithmetic", "formula"})
"""Gates of scorers that evaluate: `eval`, or the parser of sympy, which uses it."""

_COMPARED = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic color_cube_rotation count_bits
count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships
figlet_font fraction_simplification futoshiki game_of_life game_of_life_halting gcd graph_color group_anagrams
gsm_symbolic isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting
letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid
needle_haystack number_filtering number_format number_sequence number_sorting palindrome_generation
palindrome_partitioning path_star polynomial_equations pool_matrix power_function prime_factorization products
quantum_lock ransom_note rearc rectangle_count rotate_matrix rotten_oranges self_reference sentence_reordering
shortest_path simple_equations simple_geometry sokoban spell_backward string_manipulation string_splitting
string_synthesis sudoku survo syllogism time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal
word_sorting zebra_puzzles
"""

_GATED: dict[str, Gate] = {
    "binary_matrix": "list",
    "n_queens": "list",
    "spiral_matrix": "list",
    "string_insertion": "list",
    "countdown": "arithmetic",
    "puzzle24": "arithmetic",
    "intermediate_integration": "formula",
    "polynomial_multiplication": "formula",
    "simple_integration": "formula",
    # These scorers compare, but some answers take minutes or gigabytes, or get a reward although not a number.
    "boxnet": "short",
    "codeio": "short",
    "propositional_logic": "short",
    "rubiks_cube": "moves",
    "rush_hour": "moves",
    "coin_flip": "fraction",
    "complex_arithmetic": "number",
}

COMPOSITE = "composite"
"""An entry of this task names its source task as `source_dataset` of the metadata; the source task's gate applies."""

GATES: MappingProxyType[str, Gate] = MappingProxyType({**dict.fromkeys(_COMPARED.split(), "none"), **_GATED})
"""Task -> its gate."""


def check_task(task: str) -> None:
    """Raise ConfigError for a task whose scorer is not in the table."""
    if task not in GATES and task != COMPOSITE:
        raise ConfigError(
            f"prompts.tasks={task}: the scorer of this reasoning-gym task was not reviewed and may execute a model's "
            "text. Remove the task, or review its scorer and add the task to gym/tasks.py"
        )


def evaluating(tasks: Iterable[str]) -> list[str]:
    """The tasks whose scorers evaluate; composite counts, because it may contain such a task."""
    return [task for task in tasks if task == COMPOSITE or GATES[task] in EVALUATING]


def scored_tasks(config: RunConfig) -> list[str]:
    """Tasks that the scorers of reasoning-gym score; empty with another verifier.

    Raises ConfigError for a task whose scorer was not reviewed, or evaluates text although reward.isolation=none.
    """
    if verifier_name(config) != "reasoning_gym":
        return []
    assert isinstance(config.prompts, ReasoningGymPrompts)
    tasks = sorted(set(config.prompts.tasks))
    for task in tasks:
        check_task(task)
    if config.reward.isolation == "none" and (evaluated := evaluating(tasks)):
        raise ConfigError(
            f"prompts.tasks={', '.join(evaluated)}: the scorer evaluates a model's text, but "
            "reward.isolation=none. Set reward.isolation=auto or remove the tasks"
        )
    return tasks
