"""What the tests ask of a page: read as a browser reads it, without one."""

import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from unittest import mock

from vla_finetuning.report import figures

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """A page's elements and text. Fails on tags that do not nest.

    Attributes:
        elements: (tag, attributes), in order. text: what a reader sees, and figures' text.
    """

    def __init__(self, html):
        super().__init__()
        self.elements, self._open, self._text = [], [], []
        self.feed(html)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> inside {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self._text.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self._text).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(html):
    """Self-contained, nothing that runs, and what a screen reader and a keyboard need. Returns the page."""
    page = Page(html)
    assert not page.all("script")
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "data", "action"):
            value = attributes.get(name, "#")
            assert value.startswith(("#", "data:")), f"<{tag} {name}={value!r:.80}> leads out of the page"
    # What a browser enforces of that, before it reads anything that could break it.
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    allowed = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    assert allowed.pop("default-src") == "'none'" and allowed.pop("img-src") == "data:"
    assert [tag for tag, _ in page.elements[:4]] == ["html", "head", "meta", "meta"]
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert allowed == {
        **{"style-src-elem": f"'sha256-{digest}'", "style-src-attr": "'unsafe-inline'", "style-src": "'unsafe-inline'"},
        **{"base-uri": "'none'", "form-action": "'none'"},
    }
    assert "@import" not in html and "url(http" not in html

    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = [a[name].removeprefix("#") for _, a in page.elements for name in ("href",) if a.get(name, "")[:1] == "#"]
    referred += [a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a]
    assert set(referred) <= set(ids)

    (viewport,) = [a["content"] for a in page.all("meta") if a.get("name") == "viewport"]
    assert "width=device-width" in viewport
    assert page.all("html")[0]["lang"] == "en" and len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if tag in ("h1", "h2", "h3", "h4")]
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False)), "a level of headings is skipped"
    assert all(image.get("alt") for image in page.all("img"))
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert len(page.all("table")) == len(page.all("caption"))
    first_link = page.all("a")[0]
    assert first_link["class"] == "skip" and first_link["href"] == "#main"
    return page


def shown_on(module, make: Callable[[], str]):
    """Return what a page shows that `module` makes: the template's values, the figures' axes by what is said of them,
    and the text. `make` returns the page.
    """
    values, drawn, template, to_svg = {}, {}, module.page_template, figures.to_svg

    class Template:
        def __init__(self, name):
            self.name = name

        def render(self, **given):
            values.update(given)
            return template(self.name).render(**given)

    def noted(figure, label):
        drawn[label] = figure.axes
        return to_svg(figure, label)

    with mock.patch.object(module, "page_template", Template), mock.patch.object(figures, "to_svg", noted):
        return values, drawn, check_page(make()).text
