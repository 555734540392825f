"""Print the answers of examples/serve/serve.py to questions, in the form of build_chats.py."""

import argparse
import json
import time
import urllib.error
import urllib.request


def ask(url: str, prompt: str) -> str:
    """Return the continuation of a prompt, as soon as the server listens."""
    body = json.dumps({"prompt": prompt, "max_new_tokens": 40}).encode()
    for _ in range(120):
        try:
            with urllib.request.urlopen(url, body) as response:
                text: str = json.load(response)["text"]
                return text
        except urllib.error.URLError:  # the server still loads the model
            time.sleep(0.5)
    raise TimeoutError(f"no server at {url}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("questions", nargs="+")
    args = parser.parse_args()
    for question in args.questions:
        answer = ask(args.url, f"Question: {question}\nAnswer:").strip()
        print(f"{question}\n  {answer}")


if __name__ == "__main__":
    main()
