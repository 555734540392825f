"""Write questions and answers for fine-tuning: capitals of countries, and their currencies.

The lines of a file are `{"messages": [...]}`. The directory also gets a chat template.
"""

import argparse
import json
from pathlib import Path

COUNTRIES = """
    Austria Vienna euro; Brazil Brasilia real; Canada Ottawa dollar; China Beijing yuan;
    Denmark Copenhagen krone; Egypt Cairo pound; Finland Helsinki euro; France Paris euro;
    Germany Berlin euro; Hungary Budapest forint; India Delhi rupee; Italy Rome euro;
    Japan Tokyo yen; Mexico Mexico peso; Norway Oslo krone; Poland Warsaw zloty;
    Spain Madrid euro; Sweden Stockholm krona; Turkey Ankara lira; Vietnam Hanoi dong
"""
QUESTIONS = {
    "capitals": ("What is the capital of {}?", "The capital of {} is {}."),
    "currencies": ("Which money do people use in {}?", "People in {} use the {}."),
}
TEMPLATE = """\
{% for message in messages %}{% if message.role == 'assistant' %}\
Answer:{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}\
{% else %}Question: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="directory to write to")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    countries = [entry.split() for entry in COUNTRIES.split(";")]
    for topic, (question, answer) in QUESTIONS.items():
        lines = []
        for country, capital, currency in countries:
            fact = capital if topic == "capitals" else currency
            messages = [
                {"role": "user", "content": question.format(country)},
                {"role": "assistant", "content": answer.format(country, fact)},
            ]
            lines.append(json.dumps({"messages": messages}) + "\n")
        (args.directory / f"{topic}.jsonl").write_text("".join(lines))
    (args.directory / "chat_template.jinja").write_text(TEMPLATE)
    print(f"chats: {len(countries)} questions each on {', '.join(QUESTIONS)} -> {args.directory}")


if __name__ == "__main__":
    main()
