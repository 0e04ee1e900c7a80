"""Chat templates of our own in the shapes of published ones: what they demand of turns, and what they leave out."""

from __future__ import annotations

from tests.common.notations.templates import TEMPLATES, chatml

_OPENS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
_ALTERNATES = (
    "{%- for message in turns %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content | trim + '\\n' }}{%- endfor %}" + _OPENS
)

SHAPES: dict[str, str] = {
    **{style.value: source for style, source in TEMPLATES.items()},
    # Gemma 2, the first Mistral.
    "no system, turns alternate": (
        "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{%- set turns = messages %}" + _ALTERNATES
    ),
    # Llama 2, Gemma 3, Mistral.
    "system in the first turn": (
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
        "{%- else %}{%- set system = '' %}{%- set turns = messages %}{% endif %}{{ system }}" + _ALTERNATES
    ),
    # Qwen: results of one turn are together, in a user's.
    "results as a user": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{%- for message in messages %}{%- if message.role == 'tool' %}"
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
        "{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
        "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\\n</tool_call>' }}"
        "{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # Mistral: ids are checked, and calls have no text beside them.
    "ids of nine characters": (
        "{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}{%- for message in messages %}"
        "{%- if message.tool_calls %}{{ message.content + '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
        "{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
        "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
        "{{ ', ' if not loop.last }}{%- endfor %}{{ ']</s>' }}"
        "{%- elif message.role == 'tool' %}{%- if message.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have nine characters') }}{% endif %}"
        "{{ '[TOOL_RESULTS]{\"content\": ' + message.content + ', \"call_id\": ' + message.tool_call_id + '}' }}"
        "{%- elif message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}"
        "{%- else %}{{ ' ' + message.content + '</s>' }}{% endif %}{%- endfor %}"
    ),
    # Those who have reasoned before lose the thought, not the answer.
    "earlier thoughts are cut": chatml("").replace(
        "{{ message.content }}", "{{ (message.content.split('</think>') | last).lstrip('\\n') }}"
    ),
}

# Granite 3.0 to 3.3: tools and their results are shown, earlier calls are not.
LEAVES_CALLS_OUT = (
    "{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) }}"
    "{{ '<|end_of_text|>\\n' }}{% endif %}{%- for message in messages %}"
    "{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}"
    "{%- if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
    "{%- endfor %}"
)
