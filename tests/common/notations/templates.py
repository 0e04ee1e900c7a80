"""Short chat templates of our own that write tool calls and reasoning as models of each notation do."""

from __future__ import annotations

from common.types import ToolStyle

CHATML = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}CALLS{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def chatml(calls: str) -> str:
    """Return a template in which `calls` writes `message.tool_calls`."""
    return CHATML.replace("CALLS", calls)


def each(call: str, between: str = "") -> str:
    """Return a loop over calls; `f` is the function."""
    gap = "{% if not loop.last %}{{ '" + between + "' }}{% endif %}" if between else ""
    return "{%- for call in message.tool_calls %}{%- set f = call.function %}" + call + gap + "{%- endfor %}"


KEYED = "{%- for key, value in f.arguments.items() %}PARAMETER{%- endfor %}"
VALUE = "{{ value if value is string else value | tojson }}"

GEMMA_VALUE = """
{%- macro shown(value) -%}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{ 'true' if value else 'false' }}
{%- else %}{{ value }}{% endif %}
{%- endmacro %}
"""

TEMPLATES: dict[ToolStyle, str] = {
    ToolStyle.HERMES: chatml(
        each("{{ '<tool_call>\\n' + {'name': f.name, 'arguments': f.arguments} | tojson + '\\n</tool_call>' }}", "\\n")
    ),
    ToolStyle.LLAMA3: chatml(
        """{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}
        {%- set f = message.tool_calls[0].function %}
        {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}"""
    ),
    ToolStyle.PYTHONIC: chatml(
        "{{ '[' }}"
        + each(
            "{{ f.name + '(' }}{%- for key, value in f.arguments.items() %}{{ key + '=' + value | tojson }}"
            "{%- if not loop.last %}{{ ', ' }}{% endif %}{%- endfor %}{{ ')' }}",
            ", ",
        )
        + "{{ ']' }}"
    ),
    ToolStyle.MISTRAL: """
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']</s>' }}
{%- else %}{{ ' ' + message.content + '</s>' }}
{%- endif %}
{%- endfor %}
""",
    ToolStyle.MISTRAL_ARGS: """
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- else %}
{%- if message.reasoning_content %}{{ '[THINK]' + message.reasoning_content + '[/THINK]' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}
{{- '</s>' }}
{%- endif %}
{%- endfor %}
""",
    ToolStyle.QWEN3_CODER: chatml(
        each(
            "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}"
            + KEYED.replace(
                "PARAMETER",
                "{{ '<parameter=' + key + '>\\n' }}{{ value | tojson if value is mapping else value | string }}"
                "{{ '\\n</parameter>\\n' }}",
            )
            + "{{ '</function>\\n</tool_call>' }}",
            "\\n",
        )
    ),
    ToolStyle.SEED: chatml(
        each(
            "{{ '\\n<seed:tool_call>\\n<function=' + f.name + '>\\n' }}"
            + KEYED.replace("PARAMETER", "{{ '<parameter=' + key + '>' + value | string + '</parameter>\\n' }}")
            + "{{ '</function>\\n</seed:tool_call>' }}"
        )
    ),
    ToolStyle.GLM: chatml(
        each(
            "{{ '\\n<tool_call>' + f.name + '\\n' }}"
            + KEYED.replace(
                "PARAMETER",
                "{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}" + VALUE + "{{ '</arg_value>\\n' }}",
            )
            + "{{ '</tool_call>' }}"
        )
    ),
    ToolStyle.GLM47: chatml(
        each(
            "{{ '<tool_call>' + f.name }}"
            + KEYED.replace(
                "PARAMETER", "{{ '<arg_key>' + key + '</arg_key><arg_value>' }}" + VALUE + "{{ '</arg_value>' }}"
            )
            + "{{ '</tool_call>' }}"
        )
    ),
    # These two add texts, so they cannot render arguments that are objects.
    ToolStyle.DEEPSEEK_V3: chatml(
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + each(
            "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments"
            " + '\\n```<｜tool▁call▁end｜>' }}",
            "\\n",
        )
        + "{{ '<｜tool▁calls▁end｜>' }}"
    ),
    ToolStyle.DEEPSEEK_V31: chatml(
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + each("{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}")
        + "{{ '<｜tool▁calls▁end｜>' }}"
    ),
    ToolStyle.KIMI_K2: chatml(
        "{{ '<|tool_calls_section_begin|>' }}"
        + each(
            "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
            "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '<|tool_call_end|>' }}"
        )
        + "{{ '<|tool_calls_section_end|>' }}"
    ),
    ToolStyle.MINIMAX: chatml(
        "{{ '\\n<minimax:tool_call>\\n' }}"
        + each(
            "{{ '<invoke name=\"' + f.name + '\">\\n' }}"
            + KEYED.replace("PARAMETER", "{{ '<parameter name=\"' + key + '\">' }}" + VALUE + "{{ '</parameter>\\n' }}")
            + "{{ '</invoke>\\n' }}"
        )
        + "{{ '</minimax:tool_call>' }}"
    ),
    ToolStyle.MINIMAX_M1: chatml(
        "{{ '<tool_calls>\\n' }}"
        + each("{{ {'name': f.name, 'arguments': f.arguments} | tojson + '\\n' }}")
        + "{{ '</tool_calls>' }}"
    ),
    ToolStyle.DEEPSEEK_V32: chatml(
        "{{ '<｜DSML｜function_calls>\\n' }}"
        + each(
            "{{ '<｜DSML｜invoke name=\"' + f.name + '\">\\n' }}"
            + KEYED.replace(
                "PARAMETER",
                "{{ '<｜DSML｜parameter name=\"' + key + '\" string=\"' }}{{ 'true' if value is string else 'false' }}"
                "{{ '\">' }}" + VALUE + "{{ '</｜DSML｜parameter>\\n' }}",
            )
            + "{{ '</｜DSML｜invoke>\\n' }}"
        )
        + "{{ '</｜DSML｜function_calls>' }}"
    ),
    ToolStyle.HARMONY: """
{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}
{%- set f = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson + '<|call|>' }}
{%- else %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
""",
    ToolStyle.GRANITE: chatml(
        "{{ '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson(indent=4) }}"
    ),
    ToolStyle.GEMMA: GEMMA_VALUE
    + chatml(
        each(
            "{{ '<|tool_call>call:' + f.name + '{' }}{%- for key, value in f.arguments | dictsort %}"
            "{{ key + ':' }}{{ shown(value) }}{%- if not loop.last %}{{ ',' }}{% endif %}{%- endfor %}"
            "{{ '}<tool_call|>' }}"
        )
    ),
}
