"""Every field of a kind by its path, read from the models: for suggestions, the consumer table and the reference."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]


def leaves(model: type[BaseModel], path: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Each field that holds a value itself. Lists add nothing to the path; a field with a short form and a mapping
    form comes once as itself and once for each field of the mapping."""
    for name, info in named(model):
        inner = models_in(info.annotation)
        if not inner or _has_short_form(info.annotation):
            yield (*path, name), info
        for child in inner:
            yield from leaves(child, (*path, name))


def named(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields as a document calls them."""
    for name, info in model.model_fields.items():
        yield info.alias or name, info


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of this annotation may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def names_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names that the mapping at `location` (pydantic's, with list indices and union tags) may have."""
    current = [model]
    for step in location:
        following = [
            child
            for one in current
            for name, info in named(one)
            if name == step
            for child in models_in(info.annotation)
        ]
        current = following or current
    return [name for one in current for name, _ in named(one)]


def _has_short_form(annotation: Any) -> bool:
    """True where a word or quantity is as good as the mapping."""
    return any(not models_in(form) for form in _forms(annotation))


def _forms(annotation: Any) -> Iterator[Any]:
    """The alternatives of a union, None left out."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _forms(get_args(annotation)[0])
    elif origin in {Union, UnionType}:
        for form in get_args(annotation):
            yield from _forms(form)
    elif annotation is not type(None):
        yield annotation
