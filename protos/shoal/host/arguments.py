"""Command lines that `argparse` reads. A mistake is answered as by `shoal`, with the code USAGE and status 2."""

import argparse
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from shoal.host.program_help import HEADING, Example, format_examples
from shoal.host.refusal_text import print_refusal
from shoal.types.codes import Code, Refusal, ShoalError

_REQUIRED: Final = "the following arguments are required: "
_SURPLUS: Final = "unrecognized arguments: "
_AMBIGUOUS: Final = re.compile(r"ambiguous option: (\S+) could match (.+)")
_CHOICE: Final = re.compile(r"invalid choice: '(.*)' \(choose from .*\)")
_VALUE: Final = re.compile(r"invalid \S+ value: (.+)", re.DOTALL)
_IS_NOT: Final = re.compile(r"(.*) is not ((?:one of|an?|between) .+)", re.DOTALL)
"""What argparse says, and what our types of options say."""


class ArgumentParser(argparse.ArgumentParser):
    """Its verbs are read by parsers of this class too."""

    def __init__(self, *arguments: Any, examples: Iterable[Example] = (), **options: Any) -> None:
        """examples: of its help."""
        shown = tuple(examples)
        options |= {"epilog": format_examples(shown), "formatter_class": _HelpFormatter} if shown else {}
        super().__init__(*arguments, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """No verb leaves words over for another: who says so here can name the verb."""
        found, surplus = super().parse_known_args(args, namespace)
        if surplus:
            self.error(_SURPLUS + " ".join(surplus))
        return found, surplus

    def error(self, message: str) -> NoReturn:
        cause = sys.exc_info()[1]
        is_of_one = isinstance(cause, argparse.ArgumentError) and cause.argument_name is not None
        print_refusal(self._refusal_of(cause) if is_of_one else self._refusal_of_words(message))  # type: ignore[arg-type]
        self.exit(2)

    def _refusal_of(self, error: argparse.ArgumentError) -> Refusal:
        """Of the value that one argument was given."""
        name = str(error.argument_name)
        about = self._about((name,))
        if isinstance(cause := getattr(error.__context__, "__cause__", None), ShoalError):
            refusal = cause.refusal
            return self._refuse(f"{name}: {refusal.found}", refusal.asked or about, refusal.remedy)
        verbs = self._verbs()
        if (choice := _CHOICE.fullmatch(error.message)) is not None and verbs:
            near = get_close_matches(choice[1], verbs, 1)
            remedy = f"{self.prog} {near[0]}" if near else ""
            return self._refuse(f"no verb is called {choice[1]!r:.80}", f"one of {', '.join(verbs)}", remedy)
        if (value := _VALUE.fullmatch(error.message)) is not None:
            return self._refuse(f"{value[1]:.80} for {name}", about)
        if (mistake := _IS_NOT.fullmatch(error.message)) is not None:
            return self._refuse(f"{mistake[1]} for {name}", mistake[2])
        return self._refuse(f"{name}: {error.message}", about)

    def _refusal_of_words(self, message: str) -> Refusal:
        """Of words that are missing or surplus, or that argparse cannot assign to an argument."""
        if message.startswith(_REQUIRED):
            names = message.removeprefix(_REQUIRED).split(", ")
            if verbs := self._verbs():
                return self._refuse("no verb", f"one of {', '.join(verbs)}")
            return self._refuse(f"no {', no '.join(names)}", self._about(names))
        if message.startswith(_SURPLUS):
            surplus = message.removeprefix(_SURPLUS)
            word = surplus.split(" ")[0].partition("=")[0]
            if not word.startswith("-"):
                return self._refuse(f"{surplus:.80} after all that it takes")
            near = get_close_matches(word, self._option_string_actions, 1)
            remedy = f"{self.prog} {near[0]}" if near else ""
            return self._refuse(f"no option is called {word!r:.80}", "one of those in the help", remedy)
        if (ambiguous := _AMBIGUOUS.fullmatch(message)) is not None:
            return self._refuse(f"{ambiguous[1]:.80}, which begins several options", f"one of {ambiguous[2]}")
        return self._refuse(message)

    def _refuse(self, found: str, wanted: str = "", remedy: str = "") -> Refusal:
        return Refusal(Code.USAGE, found, wanted, ", or ".join(filter(None, (remedy, f"{self.prog} --help"))))

    def _about(self, names: Iterable[str]) -> str:
        """What the help says of these arguments."""
        meanings = {"/".join(each.option_strings): each.help or "" for each in self._actions}
        said = [(name, meanings.get(name, "").replace("%%", "%").removesuffix(".")) for name in names]
        return "; ".join(f"{name}: {meaning}" for name, meaning in said if meaning)

    def _verbs(self) -> list[str]:
        """Empty for a verb itself."""
        found = (each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return [verb for choices in found for verb in choices]


class _HelpFormatter(argparse.HelpFormatter):
    """Leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(HEADING) else super()._fill_text(text, width, indent)
