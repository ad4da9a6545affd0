"""GSM8K: grade-school word problems whose answer is a number; 7,473 to train on, 1,319 to test.

    python examples/data/gsm8k.py --out runs/gsm8k

Reward: "gsm8k". Source: openai/gsm8k, or train.jsonl and test.jsonl of openai/grade-school-math
(MIT licence). `extra_info` keeps the question and the worked answer for supervised fine-tuning:
prompt_key="extra_info.question", response_key="extra_info.answer".
"""

from preparation import Row, main, verl_row

INSTRUCTION = 'Think step by step, then write the final answer as a number after "####".'


def convert(row: Row) -> Row:
    question, answer = row["question"], row["answer"]
    _, mark, final = answer.rpartition("####")
    if not mark:
        raise ValueError("the answer has no '####' before its result")
    truth = final.strip().replace(",", "")
    prompt = f"{question.strip()} {INSTRUCTION}"
    return verl_row("openai/gsm8k", prompt, truth, question=question, answer=answer)


if __name__ == "__main__":
    main(__doc__, "openai/gsm8k", "main", ("train", "test"), ("question", "answer"), convert)
