"""Convert text to the .bin/.idx token files that training reads.

    python tools/preprocess_data.py --input corpus/*.jsonl --output-prefix data/corpus --append-eod
        --workers 8 --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

Inputs are read in the given order: JSON lines (.jsonl, .ndjson, .json: one object per line) or
plain text (any other name), optionally compressed (.gz). Documents keep the order of the input for
any number of workers. The output `<prefix>_<key>_document.bin/.idx` appears when it is complete: an
interrupted run leaves no files.

A line that cannot be tokenized is an error that names the file and the line; --skip-bad-lines N
leaves out up to N of them.
"""

from __future__ import annotations

import signal
import sys

from megatron.core.flags import explain_error
from megatron.core.imports import program_imports
from megatron.core.terminal import INTERRUPTED, format_error, print_line
from megatron.training.config.arguments import FlagParser, build, parse_flags
from megatron.training.data.preprocess_config import PreprocessConfig
from megatron.training.data.tokenizer import TokenizerConfig


def main(argv: list[str] | None = None) -> None:
    sections = {"Text and documents": PreprocessConfig, "Tokenizer": TokenizerConfig}
    try:
        flag_values, _ = parse_flags(FlagParser(sections), sys.argv[1:] if argv is None else argv)
        config = build(PreprocessConfig, flag_values)
        tokenizer_config = build(TokenizerConfig, flag_values)

        # Imported after parsing, because importing torch takes seconds.
        with program_imports():
            from megatron.commands.preprocessing import preprocess

        preprocess(config, tokenizer_config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {format_error(explain_error(error))}")
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        sys.exit("error: a worker process was killed (out of memory?): try fewer --workers")
    except KeyboardInterrupt:
        print_line("interrupted: no files are written", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    # Unwind on SIGTERM: discard the files, end the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
