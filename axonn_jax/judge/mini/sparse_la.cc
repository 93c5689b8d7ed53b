//@ name sparse_la_product_with_vector
//@ size 50000
//@ prompt
/* Multiply the sparse matrix A with the vector x and store the result in y: y = A x.
   A is in CSR format: the entries of row i are values[k] in column columns[k], for k from rows[i] up to rows[i+1]-1.
{model}   Example:

   input: rows = [0, 1, 1, 3], columns = [1, 0, 2], values = [2, 3, 4], x = [1, 10, 100]
   output: y = [20, 0, 403]
*/
void multiplySparse(std::vector<size_t> const& rows, std::vector<size_t> const& columns, std::vector<double> const& values, std::vector<double> const& x, std::vector<double> &y) {
//@ serial
    for (size_t i = 0; i + 1 < rows.size(); i += 1) {
        double sum = 0.0;
        for (size_t k = rows[i]; k < rows[i + 1]; k += 1) {
            sum += values[k] * x[columns[k]];
        }
        y[i] = sum;
    }
}
//@ omp
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < y.size(); i += 1) {
        y[i] = 0.0;
        for (size_t k = rows[i]; k < rows[i + 1]; k += 1) y[i] += values[k] * x[columns[k]];
    }
}
//@ driver
struct Case {
    std::vector<size_t> rows, columns;
    std::vector<double> values, x, y;
};

Case draw(size_t size, Random &random) {
    Case made;
    made.rows.push_back(0);
    for (size_t i = 0; i < size; i += 1) {
        for (int count = whole(random, 0, 20); count > 0; count -= 1) {
            made.columns.push_back(whole(random, 0, size - 1));
            made.values.push_back(uniform(random, -1, 1));
        }
        made.rows.push_back(made.values.size());
        made.x.push_back(uniform(random, -1, 1));
    }
    made.y.assign(size, 7.0);
    return made;
}

void sample(Case &c) { multiplySparse(c.rows, c.columns, c.values, c.x, c.y); }
void best(Case &c) { reference::multiplySparse(c.rows, c.columns, c.values, c.x, c.y); }
bool same(Case const &got, Case const &wanted) { return near(got.y, wanted.y); }
