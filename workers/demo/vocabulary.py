"""The closed vocabulary of the demo policy: 128 tokens of which none is the beginning of another.

So any sequence of tokens spells a text that reads back as exactly that sequence. That is what keeps a re-rendered
conversation equal, token for token, to what the policy sampled.
"""

from workers.gym.safe.game import OWNERS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PHRASES = (
    *("\n", "system\n", "user\n", "assistant\n", "Tools:", "turn", "(", "/", ")", "digit", "dial"),
    *("Open", " safe", " of", ".", " parts", " and", " turns", *(f" {owner}" for owner in OWNERS)),
    *("split", "guess", " dial", " is", " to", "all", "no", " open", " left", "done"),
    *('{"name": "turn", "arguments": {"dial": ', ', "digit": ', "}}"),
    *('{"hint": "', "higher", "lower", "open", "stop", '"}', '", "left": 0}', '{"error": "bad call"}'),
    *(str(digit) for digit in range(10)),
    *(f" {digit}" for digit in range(10)),
)
SIZE = 128  # Megatron-core pads a vocabulary to a multiple of this
_FREE = SIZE - len(SPECIAL) - len(TAGS) - len(PHRASES)
WORDS = (*PHRASES, *(f"<free {index}>" for index in range(_FREE)))
TOKENS = (*SPECIAL, *TAGS, *WORDS)
