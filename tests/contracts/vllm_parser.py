"""Answers argument lists, a JSON line each, with what vLLM's own parser makes of them; runs in vLLM's environment."""

import json
import sys


def main() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    print("ready", flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        try:
            found = vars(parser.parse_args(words))
        except SystemExit as error:
            found = {"refused": str(error)}
        print(json.dumps(found, default=str, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
