import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny_model import SPECIAL_TOKENS, byte_tokenizer
from zero_core.data.examples import CompletionExample, PreferenceExample, TextExample, parse_example
from zero_core.data.tokenize import ExampleTokenizer, Note, TemplateSettings, TokenizedExample

END = "<|im_end|>"
PIECES = ["a", " ", "  ", "\n", "\n\n", "é", "🙂", "漢字", "word", "0x1f", "\t", "<b>", "user", "\u200b"]


def learnt(tokenizer: PreTrainedTokenizerFast, example: TokenizedExample) -> list[str]:
    """Each run of tokens to learn, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], example.target_mask.astype(np.int8), [0]))))
    return [
        str(tokenizer.decode(example.input_ids[start:end]))
        for start, end in zip(*[iter(edges)] * 2, strict=True)
    ]


def trimmed_offsets() -> PreTrainedTokenizerFast:
    """As Llama 3's: leading spaces belong to tokens and not to their offsets."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def trained_bpe() -> PreTrainedTokenizerFast:
    """With merges, so that tokens are longer than a byte."""
    from tokenizers import decoders, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system word a a a", *PIECES] * 20, trainer)
    wrapped = byte_tokenizer()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=wrapped.bos_token, eos_token=wrapped.eos_token
    )
    fast.chat_template = wrapped.chat_template
    return fast


def random_chat(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """A conversation and what is to be learnt of it. Answers begin with a letter: a merged newline in
    front of one would rightly count as its first token."""
    messages: list[dict[str, Any]] = []
    expected = []
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": "".join(draw.choices(PIECES, k=draw.randrange(6)))})
        text = "a" + "".join(draw.choices(PIECES, k=draw.randrange(8)))
        weight = draw.randrange(2)
        messages.append({"role": "assistant", "content": text, "weight": weight})
        if weight:
            expected.append(text + END)
    if not expected:
        messages.append({"role": "assistant", "content": "a"})
        expected.append("a" + END)
    return {"messages": messages}, expected


@pytest.mark.parametrize("build", [byte_tokenizer, trimmed_offsets, trained_bpe])
def test_the_mask_decodes_to_exactly_the_answers(build: Any) -> None:
    tokenizer = build()
    tokenize = ExampleTokenizer(tokenizer)
    draw = random.Random(0)
    for _ in range(200):
        value, expected = random_chat(draw)
        (example,) = tokenize(parse_example(1, value, "chat")).sample
        assert learnt(tokenizer, example) == expected
        plain = [{k: v for k, v in m.items() if k != "weight"} for m in value["messages"]]
        whole = tokenizer.apply_chat_template(plain, return_dict=True)["input_ids"]
        assert example.input_ids.tolist() == whole
        assert example.input_ids.dtype == np.int32


@pytest.mark.parametrize("build", [byte_tokenizer, trimmed_offsets, trained_bpe])
def test_completion_and_end_are_learnt_and_the_prompt_is_not(build: Any) -> None:
    tokenizer = build()
    (example,) = ExampleTokenizer(tokenizer)(CompletionExample(1, "2 + 2 =", "  4 🙂 ")).sample
    assert learnt(tokenizer, example) == ["  4 🙂 " + END]
    assert tokenizer.decode(example.input_ids) == "2 + 2 =  4 🙂 " + END


def test_a_token_across_the_border_is_learnt() -> None:
    words = {"[UNK]": 0, "ab": 1, "cd": 2, END: 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token=END)
    (example,) = ExampleTokenizer(fast)(CompletionExample(1, "AB c", "D")).sample
    assert example.input_ids.tolist() == [1, 2, 3]
    assert example.target_mask.tolist() == [False, True, True]


def test_text_is_learnt_whole_and_special_tokens_of_the_tokenizer_stay() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<|im_start|> $A {END}", special_tokens=[("<|im_start|>", 256), (END, 257)]
    )
    (example,) = ExampleTokenizer(tokenizer)(TextExample(1, "hé")).sample
    assert tokenizer.decode(example.input_ids) == "<|im_start|>hé" + END
    assert example.target_mask.tolist() == [False, True, True, True, True]
    assert example.target_tokens == 4


def test_the_first_token_is_never_predicted() -> None:
    (example,) = ExampleTokenizer(byte_tokenizer())(TextExample(1, "abc")).sample
    assert (len(example), example.target_mask.sum(), example.target_tokens) == (4, 4, 3)


def begins_and_ends() -> PreTrainedTokenizerFast:
    """As Llama's: the tokenizer puts a begin before a text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("text", ["ab", "<s>ab", "ab</s>", "<s>ab</s>\n", "ab</s></s> \n"])
def test_a_text_has_one_begin_and_one_end(text: str) -> None:
    tokenizer = begins_and_ends()
    (example,) = ExampleTokenizer(tokenizer)(TextExample(1, text)).sample
    assert tokenizer.decode(example.input_ids) == "<s>ab</s>"
    assert example.target_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize("completion", ["cd", "cd</s>", "cd</s>\n"])
@pytest.mark.parametrize("prompt", ["ab", "<s>ab"])
def test_a_completion_has_one_begin_and_one_end(prompt: str, completion: str) -> None:
    tokenizer = begins_and_ends()
    (example,) = ExampleTokenizer(tokenizer)(CompletionExample(1, prompt, completion)).sample
    assert tokenizer.decode(example.input_ids) == "<s>abcd</s>"
    assert learnt(tokenizer, example) == ["cd</s>"]


def test_a_begin_is_no_target() -> None:
    tokenizer = begins_and_ends()
    (example,) = ExampleTokenizer(tokenizer)(CompletionExample(1, "", "<s>ab")).sample
    assert learnt(tokenizer, example) == ["ab</s>"]
    # This tokenizer writes no begin itself: the text's stays, and is not learnt.
    bare = byte_tokenizer()
    (example,) = ExampleTokenizer(bare)(TextExample(1, "<|im_start|>ab" + END + "\n")).sample
    assert bare.decode(example.input_ids) == "<|im_start|>ab" + END
    assert example.target_mask.tolist() == [False, True, True, True]
    # A line end before the end belongs to the text.
    (example,) = ExampleTokenizer(bare)(TextExample(1, "ab\n" + END)).sample
    assert bare.decode(example.input_ids) == "ab\n" + END


def test_a_preference_is_two_whole_conversations() -> None:
    tokenizer = byte_tokenizer()
    prompt = (
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
    )
    chosen = ({"role": "assistant", "content": "yes"},)
    rejected = (
        {"role": "assistant", "content": "no", "reasoning_content": "hm"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "no!"},
    )
    example = PreferenceExample(1, prompt, chosen, rejected)
    tokenized = ExampleTokenizer(tokenizer)(example)
    first, second = tokenized.sample
    assert learnt(tokenizer, first) == ["yes" + END]
    assert learnt(tokenizer, second) == ["no" + END, "no!" + END]
    assert tokenizer.decode(second.input_ids).startswith(
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
    )
    assert tokenized.notes == (Note.REASONING_LEFT_OUT,)
    last = ExampleTokenizer(tokenizer, TemplateSettings(train_on="last"))(example)
    assert learnt(tokenizer, last.sample[1]) == ["no!" + END]
    assert last.notes == ()


@pytest.mark.parametrize("build", [byte_tokenizer, trimmed_offsets, trained_bpe, begins_and_ends])
def test_annotated_pieces_are_the_text_that_is_trained(build: Any) -> None:
    tokenizer = build()
    tokenize = ExampleTokenizer(tokenizer)
    draw = random.Random(1)
    for _ in range(50):
        value, _ = random_chat(draw)
        for example in (parse_example(1, value, "chat"), CompletionExample(1, " é🙂 ", "  漢 b ")):
            (tokens,) = tokenize(example).sample
            (pieces,) = tokenize.annotate(example)
            assert "".join(text for text, _ in pieces) == tokenizer.decode(tokens.input_ids)
            assert [text for text, is_learnt in pieces if is_learnt] == learnt(tokenizer, tokens)
