"""Replies as providers send them, with all that tells them apart."""

from __future__ import annotations

from typing import Any

CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1790000000,
    "model": "gpt-5.2",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "Let me look.",
                "refusal": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"at":"harbor"}'},
                    },
                    {
                        "id": "call_2",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"at":"tower"}'},
                    },
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19},
}

DEEPSEEK: dict[str, Any] = {
    "id": "d-1",
    "model": "deepseek-v4-pro",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "",
                "reasoning_content": "The user wants the harbor. sig:deepseek",
                "tool_calls": [
                    {
                        "id": "call_0_9f",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "look", "arguments": '{"at":"harbor"}'},
                    }
                ],
            },
        }
    ],
}

OPENROUTER: dict[str, Any] = {
    "id": "or-1",
    "model": "vendor/model",
    "choices": [
        {
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning": "Hm. sig:openrouter",
                "reasoning_details": [
                    {"type": "reasoning.encrypted", "data": "sig:openrouter:3f==", "index": 0}
                ],
                "tool_calls": [
                    {
                        "id": "call_or",
                        "type": "function",
                        "function": {"name": "look", "arguments": "{}"},
                        "extra_content": {"google": {"thought_signature": "sig:openrouter:Zg=="}},
                    }
                ],
            }
        }
    ],
}

RESPONSES: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "model": "gpt-5.2",
    "status": "completed",
    "created_at": 1790000000,
    "instructions": "You are an assistant. " * 20,
    "tools": [{"type": "function", "name": "look", "parameters": {}, "strict": True}],
    "output": [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Where to look"}],
            "encrypted_content": "sig:openai-responses:gAAAA==",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [
                {"type": "output_text", "text": "Let me ", "annotations": []},
                {
                    "type": "output_text",
                    "text": "look.",
                    "annotations": [
                        {
                            "type": "url_citation",
                            "url": "https://example.org",
                            "title": "A map",
                            "start_index": 0,
                            "end_index": 4,
                        }
                    ],
                },
            ],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_a",
            "name": "look",
            "arguments": '{"at":"harbor"}',
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_2",
            "call_id": "call_b",
            "name": "look",
            "arguments": '{"at":"tower"}',
            "status": "completed",
        },
    ],
    "usage": {"input_tokens": 12, "output_tokens": 7},
}

LOOKED_UP: dict[str, Any] = {
    **RESPONSES,
    "output": [
        RESPONSES["output"][0],
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "harbor"},
        },
        {
            "type": "computer_call",
            "id": "cu_1",
            "call_id": "call_c",
            "status": "completed",
            "action": {"type": "screenshot"},
            "pending_safety_checks": [],
        },
        {**RESPONSES["output"][0], "id": "rs_2", "status": None},
        {**RESPONSES["output"][2], "id": "fc_1"},
    ],
}
"""What the API did by itself, and a call that no function answers."""

ANTHROPIC: dict[str, Any] = {
    "id": "msg_01",
    "type": "message",
    "role": "assistant",
    "model": "claude-opus-5",
    "content": [
        {"type": "thinking", "thinking": "Where is it?", "signature": "sig:anthropic:EqQ=="},
        {"type": "text", "text": "Let me "},
        {"type": "redacted_thinking", "data": "sig:anthropic:hidden"},
        {
            "type": "server_tool_use",
            "id": "srvtoolu_1",
            "name": "web_search",
            "input": {"query": "harbor"},
        },
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {
                    "type": "web_search_result",
                    "url": "https://example.org",
                    "title": "A map",
                    "encrypted_content": "sig:anthropic:page",
                }
            ],
        },
        {
            "type": "text",
            "text": "look.",
            "citations": [
                {
                    "type": "web_search_result_location",
                    "url": "https://example.org",
                    "title": "A map",
                    "cited_text": "harbor",
                    "encrypted_index": "sig:anthropic:index",
                }
            ],
        },
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "harbor"}},
        {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {"at": "tower"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 7},
}

SEARCHING: dict[str, Any] = {
    **ANTHROPIC,
    "content": [
        {
            "type": "server_tool_use",
            "id": "srvtoolu_2",
            "name": "web_search",
            "input": {"query": "tide"},
        },
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "harbor"}},
    ],
}
"""A search that the API runs when the tool has answered."""

PAUSED: dict[str, Any] = {
    **ANTHROPIC,
    "content": [{"type": "text", "text": "Let me look."}, SEARCHING["content"][0]],
    "stop_reason": "pause_turn",
}

FOUND: dict[str, Any] = {
    **ANTHROPIC,
    "content": [
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_2",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        {"type": "text", "text": "Nobody knows."},
    ],
    "stop_reason": "end_turn",
}
"""What comes after either of them."""

GEMINI: dict[str, Any] = {
    "responseId": "r1",
    "modelVersion": "gemini-4-pro",
    "candidates": [
        {
            "index": 0,
            "finishReason": "STOP",
            "content": {
                "role": "model",
                "parts": [
                    {"text": "Where is it?", "thought": True},
                    {"text": "Let me look."},
                    {
                        "functionCall": {"name": "look", "args": {"at": "harbor"}},
                        "thoughtSignature": "c2lnOmdlbWluaTox",
                    },
                    {"functionCall": {"name": "look", "args": {"at": "tower"}, "id": "fc-2"}},
                    {"text": "", "thoughtSignature": "c2lnOmdlbWluaToy"},
                ],
            },
        }
    ],
    "usageMetadata": {"totalTokenCount": 19},
}
