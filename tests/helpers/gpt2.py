"""A small GPT-2 of random weights that knows some nouns."""

from pathlib import Path

import torch
import transformers as library
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from normscope.measures.vocabulary import common_nouns

NOUNS = common_nouns()[:40]
SENTENCE = "the time of the world"


def save_gpt2(folder: Path) -> str:
    """Write the model and its tokenizer, whose nouns have a blank before them, some also without; return the folder."""
    words = ["<|endoftext|>", "the", " the", " of", *(f" {noun}" for noun in NOUNS), *NOUNS[:5], "?"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_next")
    made.decoder = decoders.Fuse()
    config = library.GPT2Config(vocab_size=len(words), n_embd=16, n_layer=3, n_head=2, n_positions=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        library.GPT2LMHeadModel(config).save_pretrained(folder)
    library.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(folder)
    return str(folder)
