"""What of an example could not be kept or learnt, though it is used: told, and no reason to stop."""

from enum import StrEnum


class Note(StrEnum):
    """A stable code; ``sentence`` is for people."""

    REASONING_LEFT_OUT = "reasoning_left_out"
    TEXT_BESIDE_CALL_LEFT_OUT = "text_beside_call_left_out"
    CONTENT_LEFT_OUT = "content_left_out"
    END_NOT_LEARNT = "end_not_learnt"
    END_IS_NO_STOP = "end_is_no_stop"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Note.REASONING_LEFT_OUT: "the chat template leaves out reasoning of an answer that is learnt",
    Note.TEXT_BESIDE_CALL_LEFT_OUT: "the chat template leaves out the text beside a tool call",
    Note.CONTENT_LEFT_OUT: "the chat template leaves out the content of a message",
    Note.END_NOT_LEARNT: "the chat template ends an answer with no token, so its end can't be learnt",
    Note.END_IS_NO_STOP: "an answer ends with a token at which the model does not stop: it is neither the "
    "tokenizer's eos_token nor one of generation_config.eos_token_id",
}
