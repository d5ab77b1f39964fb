"""The demo policy's tokenizer: one token per word of the vocabulary, and a chat template that is prefix-stable.

Prefix-stable: rendering a conversation after a turn was added extends the tokens of the rendering before it, thoughts
and tool calls included. So a rollout's prompts are one growing sequence until the agent compacts its context.
"""

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workers.demo import vocabulary

MAX_TOKENS = 2048
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in Hugging Face's format with exactly the tokens of the vocabulary."""
    alternatives = "|".join(re.escape(word) for word in vocabulary.WORDS)
    tokens = {token: index for index, token in enumerate(vocabulary.TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(alternatives), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in vocabulary.SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in vocabulary.TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _TEMPLATE.read_text()
    return fast
