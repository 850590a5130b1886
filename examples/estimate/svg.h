/*  svg.h - what pictures in SVG are drawn with: texts, lines, boxes, and the steps of an axis. */
#ifndef MEMSCALE_ESTIMATE_SVG_H
#define MEMSCALE_ESTIMATE_SVG_H

#include <stdbool.h>
#include <stdio.h>

#if defined(__GNUC__)
#define SVG_API static __attribute__((unused))
#else
#define SVG_API static
#endif

/* Begins a picture of so many pixels, whose classes have the given style. */
SVG_API void svg_begin(FILE *file, double width, double height, const char *style) {
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
            "viewBox=\"0 0 %.0f %.0f\" font-family=\"Helvetica, Arial, sans-serif\">\n"
            "<style>%s</style>\n",
            width, height, width, height, style);
}

SVG_API void svg_end(FILE *file) {
    fprintf(file, "</svg>\n");
}

/* A text in UTF-8. XML 1.0 has no control characters. */
SVG_API void svg_escaped(FILE *file, const char *text) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        const bool is_control = *c < 32 || *c == 127;
        if (*c == '<' || *c == '>' || *c == '&' || is_control) {
            fprintf(file, "&#%d;", is_control ? '?' : *c);
        } else {
            fputc(*c, file);
        }
    }
}

SVG_API void svg_text(FILE *file, double x, double y, const char *style, const char *text) {
    fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    svg_escaped(file, text);
    fprintf(file, "</text>\n");
}

/* The name of a vertical axis, from the bottom up. */
SVG_API void svg_upright(FILE *file, double x, double y, const char *text) {
    fprintf(file,
            "<text transform=\"translate(%.1f %.1f) rotate(-90)\" class=\"name\" "
            "text-anchor=\"middle\">",
            x, y);
    svg_escaped(file, text);
    fprintf(file, "</text>\n");
}

SVG_API void svg_line(FILE *file, double x1, double y1, double x2, double y2, const char *style) {
    fprintf(file, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2,
            style);
}

/* A ring that marks a point. */
SVG_API void svg_ring(FILE *file, double x, double y, double radius) {
    fprintf(file,
            "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%g\" fill=\"#fff\" stroke=\"#222\" "
            "stroke-width=\"2\"/>\n",
            x, y, radius);
}

/* 1, 2 or 5 times a power of 10, so that a range has at most `count` steps. */
SVG_API double svg_step(double range, double count) {
    double power = 1.0;
    const double rough = range / count;
    while (power * 10.0 <= rough) {
        power *= 10.0;
    }
    while (power > rough) {
        power /= 10.0;
    }
    return rough <= power         ? power
           : rough <= 2.0 * power ? 2.0 * power
           : rough <= 5.0 * power ? 5.0 * power
                                  : 10.0 * power;
}

/* Digits after the point that numbers at such steps need. */
SVG_API int svg_digits(double step) {
    int digits = 0;
    for (; step < 0.999 && digits < 6; step *= 10.0) {
        digits++;
    }
    return digits;
}

#endif // MEMSCALE_ESTIMATE_SVG_H
