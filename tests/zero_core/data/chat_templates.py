"""Chat templates with the structure of well-known families, cut to what a mask can go wrong at.

``family`` gives a tokenizer that has the template's control tokens.
"""

import re
from typing import TYPE_CHECKING

from tests.tiny_model import byte_tokenizer
from zero_core.data.template_settings import TemplateSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CALL_JSON = (
    '{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson + \'}'
)

# Ids of 9 characters, tools before the last question, calls and answers of tools as lists of objects.
MISTRAL = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{- '<s>' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and m == users[-1] %}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}"
    "{{- '[CALLS] [' }}"
    "{%- for call in m.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be 9 characters long') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{- ', ' if not loop.last else ']</s>' }}"
    "{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + '</s>' }}"
    "{%- elif m.role == 'tool' %}{{- '[RESULT] ' + m.content + ' ' + m.tool_call_id + '[/RESULT]' }}"
    "{%- else %}{{- raise_exception('unknown role') }}{%- endif %}"
    "{%- endfor %}"
)
# Each message names its channel; an answer of a tool is headed by the name of the call before it.
CHANNELS = (
    "{%- set last = namespace(name=none) %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if 'tool_calls' in m %}"
    "{%- set later = namespace(found=false) %}"
    "{%- for future in messages[loop.index:] if future.role == 'assistant' %}"
    "{%- set later.found = later.found or 'tool_calls' not in future %}{%- endfor %}"
    "{%- if m.thinking and not later.found %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{%- set last.name = m.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=' + last.name + '<|channel|>commentary<|message|>' }}"
    "{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in m %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>' + last.name + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if tools is string %}{{ tools }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# One call a turn, without the text beside it; tools inside the first question, which the loop then skips.
LLAMA_TOOLS = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|head|>user<|/head|>\n\n' + tools | tojson + messages[0].content + '<|eot|>' }}"
    "{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('single tool-calls only') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '{{- \'<|head|>assistant<|/head|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- call.arguments | tojson + '}<|eot|>' }}"
    "{%- else %}{{- '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
# The next header is what ends an answer: GLM stops at it, and says so in its generation config.
NEXT_HEADER = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Calls only where content is null, arguments as text, no header after a tool's answer, thoughts cut off.
DEEPSEEK = (
    "{% set ns = namespace(tool=false) %}{{ bos_token }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<User>' + m.content }}{% endif %}"
    "{%- if m.role == 'assistant' and m['content'] is none %}{% set ns.tool = false %}"
    "{%- for call in m.tool_calls %}"
    "{{ '<Assistant><calls>' + call.type + '<sep>' + call.function.name + '\n' + call.function.arguments }}"
    "{%- endfor %}{{ '</calls><eos>' }}{% endif %}"
    "{%- if m.role == 'assistant' and m['content'] is not none %}"
    "{%- if ns.tool %}{{ '<results/>' + m.content + '<eos>' }}{% set ns.tool = false %}"
    "{%- else %}{{ '<Assistant>' + m.content.split('</think>')[-1] + '<eos>' }}{% endif %}{% endif %}"
    "{%- if m.role == 'tool' %}{% set ns.tool = true %}{{ '<result>' + m.content }}{% endif %}"
    "{%- endfor %}{% if tools is string %}{{ tools }}{% endif %}"
    "{% if ns.tool %}{{ '<results/>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<Assistant><think>\n' }}{% endif %}"
)
CHATML_WITHOUT_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls is defined %}"
    "{{- '<|im_start|>assistant' }}"
    "{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}"
    "{{- '\n<tool_call>\n" + CALL_JSON + "\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool' }}{%- endif %}"
    "{{- '\n<result>' + m.content + '</result>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# What the tools answered stands inside the turn of the assistant that called them (Gemma 4).
ANSWERS_INSIDE = (
    "{%- for m in messages if m.role != 'tool' %}"
    "{{- '<turn>' + m.role + '\n' }}"
    "{%- for call in m.tool_calls or [] %}{{- '<call>' + call.function.name + '</call>' }}{%- endfor %}"
    "{%- if m.tool_calls %}{%- set at = messages.index(m) %}"
    "{%- for k in range(at + 1, messages | length) if messages[k].role == 'tool' %}"
    "{%- set follow = messages[k] %}{{- '<result>' + follow.content + '</result>' }}"
    "{%- endfor %}{%- endif %}"
    "{{- m.content or '' }}{{- '</turn>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<turn>assistant\n' }}{%- endif %}"
)

_CONTROL = re.compile(r"<[|/]?[a-zA-Z_]+\|?/?>|<\|/head\|>|\[/?[A-Z]+\]")


def family(template: str, *stops: str, eos: str, bos: str | None = None) -> "PreTrainedTokenizerFast":
    """A tokenizer that knows the control tokens which ``template`` writes."""
    tokenizer = byte_tokenizer(template)
    written = sorted({*_CONTROL.findall(template), *stops, eos, *([bos] if bos else [])} - {"<|im_start|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": written})
    tokenizer.eos_token = eos
    if bos:
        tokenizer.bos_token = bos
    return tokenizer


def stopping_at(tokenizer: "PreTrainedTokenizerFast", *stops: str) -> TemplateSettings:
    return TemplateSettings(stop_token_ids=frozenset(tokenizer.convert_tokens_to_ids(list(stops))))
