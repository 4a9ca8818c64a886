"""A quality report as a Markdown table and as a picture."""

from clover_cpp.errors import ArgumentError, ResourceError

SMALLEST = 1e-9  # divergence that the logarithmic axis shows

# heading, and the text of an entry's figure
COLUMNS = (
    ("file", lambda e: name(e)),
    ("MB", lambda e: f"{e['bytes'] / 1e6:.1f}"),
    ("bits per weight", lambda e: f"{e['bits_per_weight']:.2f}"),
    ("causal: KLD mean", lambda e: _kld(e["causal"], "kld_mean")),
    ("KLD 99.9 %", lambda e: _kld(e["causal"], "kld_99.9")),
    ("same top 1", lambda e: _percent(e["causal"] and e["causal"]["top1"])),
    ("block: KLD mean", lambda e: _kld(e["block"], "kld_mean")),
    ("KLD 99.9 %", lambda e: _kld(e["block"], "kld_99.9")),
    ("same top 1", lambda e: _percent(e["block"] and e["block"]["top1"])),
    ("commit flips, all masked", lambda e: _flips(e, "full")),
    ("some masked", lambda e: _flips(e, "partial")),
    ("tokens per step", lambda e: _number(e["tasks"] and e["tasks"]["tokens_per_step"])),
    ("tasks exact", lambda e: _percent(e["tasks"] and e["tasks"]["exact"])),
    ("pass time: causal", lambda e: _ratio(e, "causal")),
    ("block", lambda e: _ratio(e, "block")),
)


def name(entry):
    """A file's name without its ending."""
    return entry["file"].removesuffix(".gguf")


def _kld(summary, key):
    return f"{summary[key]:.2g}" if summary else "–"


def _percent(share):
    return f"{100 * share:.1f} %" if share is not None else "–"


def _flips(entry, state):
    flips = entry["flips"] and entry["flips"][state]
    return f"{100 * flips['rate']:.2f} %" if flips and flips["rate"] is not None else "–"


def _ratio(entry, kind):
    return _number(entry["pass_time"] and entry["pass_time"][kind])


def _number(value):
    return f"{value:.2f}" if value is not None else "–"


def markdown(report):
    """The table, as text. "–": not measured, or the base itself."""
    rows = [[heading for heading, _ in COLUMNS], ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    rows += [[text(entry) for _, text in COLUMNS] for entry in report["models"]]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def figure_class(path):
    """matplotlib's `Figure`. Raises ResourceError without it, ArgumentError where it does not write files of the path's ending."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ResourceError('the plot needs matplotlib: pip install "clover-cpp[report]"') from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ArgumentError(f"{path}: not the ending of a picture: {', '.join(sorted(known))}")
    return Figure


def plot(report, path):
    """A picture, its format by the path's ending: bits per weight against the 99.9 % quantile of the KL divergence.

    Errors as of `figure_class`.
    """
    new = figure_class(path)
    kinds = [kind for kind in ("causal", "block") if any(entry[kind] for entry in report["models"])]
    entries = sorted((entry for entry in report["models"] if entry["causal"]), key=lambda entry: -entry["bits_per_weight"])
    rows = -(-len(entries) // 4)
    figure = new(figsize=(6.5 * max(1, len(kinds)), 5.5 + 0.22 * rows), layout="constrained")
    panels = figure.subplots(1, max(1, len(kinds)), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=False):
        axes.set(title=f"{kind} passes", xlabel="bits per weight", yscale="log")
        axes.grid(True, which="major", alpha=0.4)
        _points(axes, kind, entries)
    panels[0].set_ylabel("KL divergence from the base, 99.9 % quantile (nats)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=110)


def _points(axes, kind, entries):
    """Points are numbered, names would overlap. What a name has before "+" gives the colour, triangles have more (an imatrix)."""
    colors = {}
    for number, entry in enumerate(entries, 1):
        recipe, _, more = name(entry).partition("+")
        color = colors.setdefault(recipe, f"C{len(colors) % 10}")
        x, y = entry["bits_per_weight"], max(entry[kind]["kld_99.9"], SMALLEST)
        axes.plot(x, y, "^" if more else "o", color=color, markersize=7, label=f"{number}  {name(entry)}", linestyle="")
        axes.annotate(
            str(number), (x, y), xytext=(-6, 0) if more else (6, 0), textcoords="offset points", fontsize=9,
            ha="right" if more else "left", va="center",
        )  # fmt: skip
