"""Lists all fields of a kind by path, from the models: for suggestions, the consumer table and the reference."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]


def leaf_fields(model: type[BaseModel], path: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Each field that holds a value itself. A list adds nothing to the path. A field with a short form and a mapping
    form is yielded once itself, and once for each field of the mapping."""
    for name, info in document_fields(model):
        inner = models_in(info.annotation)
        if not inner or _has_short_form(info.annotation):
            yield (*path, name), info
        for child in inner:
            yield from leaf_fields(child, (*path, name))


def document_fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Fields of the model under their names in a document."""
    for name, info in model.model_fields.items():
        yield info.alias or name, info


def every_model(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model, and those that its fields may hold, some of them more than once."""
    yield model
    for _, info in document_fields(model):
        for inner in models_in(info.annotation):
            yield from every_model(inner)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Models that a value of this annotation may be or contain."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def names_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Field names that the mapping at `location` (pydantic's, with list indices and union tags) may have."""
    current = [model]
    for step in location:
        following = [
            child
            for one in current
            for name, info in document_fields(one)
            if name == step
            for child in models_in(info.annotation)
        ]
        current = following or current
    return [name for one in current for name, _ in document_fields(one)]


def _has_short_form(annotation: Any) -> bool:
    """Whether the field accepts a word or quantity in place of a mapping."""
    return any(not models_in(form) for form in _forms(annotation))


def _forms(annotation: Any) -> Iterator[Any]:
    """The alternatives of a union, without None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _forms(get_args(annotation)[0])
    elif origin in {Union, UnionType}:
        for form in get_args(annotation):
            yield from _forms(form)
    elif annotation is not type(None):
        yield annotation
