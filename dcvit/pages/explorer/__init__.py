"""Explorer of composed heads: one HTML file that recomputes composition in the browser.

`samples` packs the arrays of an input: queries, keys, values and factors. `page` writes the file. The page
computes scores, compositions and softmax from these arrays (`attention.js`), draws them (`views.js`) and handles the
controls (`explorer.js`).
"""
